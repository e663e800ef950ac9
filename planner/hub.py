"""A model's `config.json` by hub id: from the local Hugging Face cache, or downloaded alone. Nothing is written."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from zplan.planner.errors import ZplanError
from zplan.planner.reading import parse_json, read_json

if TYPE_CHECKING:
    from urllib.request import Request

ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 10.0
MAX_CONFIG_BYTES = 4 * 2**20

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(text: str) -> bool:
    """Whether a text reads like `org/name`."""
    return bool(_HUB_ID.fullmatch(text))


def cache_folder() -> str:
    """Where the hub's own client keeps its files: HF_HUB_CACHE, or `hub` in HF_HOME."""
    if path := os.environ.get("HF_HUB_CACHE"):
        return os.path.expanduser(path)
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface")
    return os.path.join(os.path.expanduser(home), "hub")


def cached_config(hub_id: str) -> str | None:
    """Path of the cached `config.json`: that of `main`, else of the snapshot written last; or None."""
    folder = os.path.join(cache_folder(), "models--" + hub_id.replace("/", "--"))
    try:
        with open(os.path.join(folder, "refs", "main"), encoding="utf-8") as f:
            path = os.path.join(folder, "snapshots", f.read().strip(), "config.json")
        if os.path.isfile(path):
            return path
    except OSError:
        pass
    snapshots = os.path.join(folder, "snapshots")
    try:
        found = [os.path.join(snapshots, rev, "config.json") for rev in os.listdir(snapshots)]
    except OSError:
        return None
    found = [path for path in found if os.path.isfile(path)]
    return max(found, key=os.path.getmtime, default=None)


def offline_asked(*, offline: bool) -> bool:
    """Whether the network must stay untouched: by flag, or by the hub client's own variable."""
    return offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def hub_config(hub_id: str, *, offline: bool) -> tuple[dict[str, Any], str]:
    """`(config, source in words)` of a hub id, from the cache or the hub."""
    if path := cached_config(hub_id):
        return read_json(path), f"local Hugging Face cache, {path}"
    if offline_asked(offline=offline):
        what = "--offline" if offline else "HF_HUB_OFFLINE"
        raise ZplanError(
            f"`{hub_id}` is not in zplan's table or the local Hugging Face cache, and {what} forbids a download",
            f"{'drop' if offline else 'unset'} {what}, or give the folder or config.json of the model",
        )
    return download_config(hub_id)


def download_config(hub_id: str) -> tuple[dict[str, Any], str]:
    """Fetch `config.json` alone from HF_ENDPOINT, with HF_TOKEN where it is set."""
    from urllib.error import HTTPError, URLError

    endpoint = (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    if not endpoint.startswith(("https://", "http://")):
        raise ZplanError(f"HF_ENDPOINT is `{endpoint}`, which is no web address", f"set it to {ENDPOINT}, or unset it")
    url = f"{endpoint}/{hub_id}/resolve/main/config.json"
    token = os.environ.get("HF_TOKEN", "").strip()
    try:
        text = _get(url, token)
    except HTTPError as e:
        with e:
            raise _http_error(hub_id, endpoint, e.code, has_token=bool(token)) from None
    except (URLError, OSError, ValueError) as e:
        # TimeoutError is an OSError; urllib wraps it in URLError when it strikes while connecting.
        reason = getattr(e, "reason", e)
        late = isinstance(reason, TimeoutError)
        what = f"did not answer within {TIMEOUT_S:g} s" if late else f"cannot be reached: {reason}"
        raise ZplanError(
            f"`{hub_id}` is not in zplan's table or the local Hugging Face cache, and {endpoint} {what}",
            "check the network or HF_ENDPOINT, or give the folder or config.json of the model",
        ) from None
    return parse_json(text, url), url


def _http_error(hub_id: str, endpoint: str, code: int, *, has_token: bool) -> ZplanError:
    if code in (401, 403):
        hint = "accept its licence on its page with the account of this token" if has_token else "set HF_TOKEN"
        # The hub answers 401 for a repository that does not exist, so that private names stay private.
        return ZplanError(
            f"{endpoint} does not show `{hub_id}` (HTTP {code}): it is gated, private, or does not exist",
            f"check the name; if it is right, {hint}",
        )
    if code == 404:
        return ZplanError(f"{endpoint} has no `{hub_id}` with a config.json (HTTP 404)", "check the name")
    return ZplanError(f"{endpoint} answered HTTP {code} for `{hub_id}`", "try again later, or give its config.json")


def _get(url: str, token: str) -> str:
    """Body of a URL as text. The token goes to the first host only, also after a redirect."""
    from urllib.parse import urlsplit
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    host = urlsplit(url).netloc

    class SameHost(HTTPRedirectHandler):
        def redirect_request(self, req: Request, *args: Any) -> Request | None:
            new = super().redirect_request(req, *args)
            if new is not None and token and urlsplit(new.full_url).netloc == host:
                new.add_unredirected_header("Authorization", f"Bearer {token}")
            return new

    request = Request(url, headers={"User-Agent": "zplan", "Accept": "application/json"})
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    with build_opener(SameHost).open(request, timeout=TIMEOUT_S) as response:
        body: bytes = response.read(MAX_CONFIG_BYTES + 1)
    if len(body) > MAX_CONFIG_BYTES:
        raise ZplanError(
            f"{url} is larger than {MAX_CONFIG_BYTES // 2**20} MiB, so it is no config.json", "check the id"
        )
    return body.decode("utf-8", errors="replace")
