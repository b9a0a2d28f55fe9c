# The wheels of MuJoCo 4.0 carry no types for the compiled bindings. All names exist, of unknown type.
from typing import Any

def __getattr__(name: str) -> Any: ...
