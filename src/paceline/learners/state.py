"""State of the parts of a learner, as nested dicts of tensors and numbers with strings for keys.

A part is a module, an optimizer, a tensor, an object with `state` and `load_state`, or a dict of parts.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def state_of(part: Any) -> Any:
    """Return a copy of the state of a part."""
    match part:
        case dict():
            return {name: state_of(each) for name, each in part.items()}
        case Tensor():
            return part.detach().clone()
        case nn.Module():
            return state_of(part.state_dict())
        case Optimizer():
            found = part.state_dict()
            moments = {str(index): state_of(each) for index, each in found["state"].items()}
            return {"learning_rate": [float(group["lr"]) for group in found["param_groups"]], "parameters": moments}
    return part.state()


def load_state_of(part: Any, state: Any) -> None:
    """Load a state that `state_of` returned into a part. Keys that a dict of parts does not have are ignored."""
    match part:
        case dict():
            for name, each in part.items():
                load_state_of(each, state[name])
        case Tensor():
            part.copy_(state)
        case nn.Module():
            part.load_state_dict(state)
        case Optimizer():
            whole = part.state_dict()
            for group, learning_rate in zip(whole["param_groups"], state["learning_rate"], strict=True):
                group["lr"] = learning_rate
            # Copies, because the optimizer keeps the tensors and updates them in place.
            whole["state"] = {int(index): state_of(moments) for index, moments in state.get("parameters", {}).items()}
            part.load_state_dict(whole)
        case _:
            part.load_state(state)
