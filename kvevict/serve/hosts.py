"""The names of the server that a request may be sent to. A page of another site can give its site's name this machine's
address (DNS rebinding), but not the Host that the browser sends then."""

import ipaddress
import re

LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]\s]*))(?::[0-9]*)?")


class Hosts:
    """ASGI middleware. Requests whose Host is not local, not the address that they came to and not allowed get the
    response that `refusal` makes of their scope. Those without a Host (HTTP/1.0) come from no browser."""

    def __init__(self, app, allowed, refusal):
        self.app, self.refusal = app, refusal
        self.allowed = LOCAL | {name_of(each) for each in allowed}

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http":
            for key, value in scope["headers"]:
                if key == b"host" and not self._allows(value.decode("latin-1"), scope.get("server")):
                    await self.refusal(scope)(scope, receive, send)
                    return
        await self.app(scope, receive, send)

    def _allows(self, host: str, server) -> bool:
        name = name_of(host)
        return name is not None and (name in self.allowed or (server is not None and name == name_of(server[0])))


def name_of(host: str) -> str | None:
    """A name or an address, without a port and as it is compared; None for anything else."""
    found = HOST.fullmatch(host)
    six, name = found.groups("") if found else (host, "")
    try:
        return str(ipaddress.ip_address(six or name))
    except ValueError:
        return None if six or "/" in name else name.lower().rstrip(".")
