"""An engine behind the HTTP API that OpenAI's clients speak: `pallas-attn serve`."""

from .app import App as App
from .asked import Served as Served
from .limits import Limits as Limits
from .server import Server as Server
from .server import bound as bound

__all__ = ["App", "Limits", "Served", "Server", "bound"]
