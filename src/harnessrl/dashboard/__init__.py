"""The web page at the gateway's own address, and the routes that only it needs.

The gateway doesn't know it: whoever starts one hands it `router` (see `cli/gateway.py`). Everything is read only.
"""

from harnessrl.dashboard.routes import router

__all__ = ["router"]
