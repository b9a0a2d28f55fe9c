"""Settings of torch."""


def configure_torch_backends() -> None:
    pass
