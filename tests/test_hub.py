"""Hub ids: our table, the local cache, one download from a local server; and every way that can fail."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from zplan.planner import hub
from zplan.planner.errors import ZplanError
from zplan.planner.sources import model_from

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Hub(BaseHTTPRequestHandler):
    """Answers by path; remembers what it was asked."""

    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        name = self.path.split("/resolve/")[0].strip("/")
        status = {"org/missing": 404, "org/gated": 401, "org/forbidden": 403, "org/broken": 500}.get(name, 200)
        body = {"org/junk": b"<html>", "org/huge": b" " * (hub.MAX_CONFIG_BYTES + 2)}.get(
            name, json.dumps(CONFIG).encode()
        )
        if name == "org/moved":
            self.send_response(307)
            self.send_header("Location", "/org/tiny/resolve/main/config.json")
            self.end_headers()
            return
        if name == "org/away":
            self.send_response(302)
            self.send_header(
                "Location", f"http://localhost:{self.server.server_port}/org/tiny/resolve/main/config.json"
            )
            self.end_headers()
            return
        if name == "org/slow":
            self.server.release.wait(5)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    httpd.daemon_threads = True
    httpd.seen, httpd.release = [], threading.Event()
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{httpd.server_port}")
    monkeypatch.setenv("no_proxy", "*")
    yield httpd
    httpd.release.set()
    httpd.shutdown()
    httpd.server_close()


def refusal(name, **kwargs):
    with pytest.raises(ZplanError) as caught:
        model_from(name, None, **kwargs)
    assert "\n" not in caught.value.message and caught.value.hint
    return caught.value


def test_config_alone_is_downloaded_and_nothing_is_written(server, tmp_path):
    found = model_from("org/tiny", None)
    assert found.arch.hidden == 64 and found.spec.name == "org/tiny"
    assert server.seen == [("/org/tiny/resolve/main/config.json", None)]
    assert not (tmp_path / "hf").exists()


def test_our_table_comes_first(server):
    assert model_from("meta-llama/Llama-2-7b-hf", None).spec.name == "llama-2-7b"
    assert server.seen == []


def test_the_cache_comes_before_the_network(server, tmp_path):
    folder = tmp_path / "hf" / "hub" / "models--org--tiny"
    for rev, width in (("aaa", 32), ("bbb", 96)):
        (folder / "snapshots" / rev).mkdir(parents=True)
        (folder / "snapshots" / rev / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": width}))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("aaa")
    assert model_from("org/tiny", None, offline=True).arch.hidden == 32
    (folder / "refs" / "main").unlink()
    assert model_from("org/tiny", None, offline=True).arch.hidden in (32, 96)
    assert server.seen == []


def test_hf_hub_cache_wins_over_hf_home(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    snapshot = tmp_path / "other" / "models--org--tiny" / "snapshots" / "x"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    assert "other" in model_from("org/tiny", None).source
    assert server.seen == []


def test_the_token_goes_to_the_first_host_only(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    model_from("org/moved", None)
    assert [auth for _, auth in server.seen] == ["Bearer secret", "Bearer secret"]
    server.seen.clear()
    model_from("org/away", None)
    assert [auth for _, auth in server.seen] == ["Bearer secret", None]


@pytest.mark.parametrize(
    ("name", "token", "said", "hint"),
    [
        ("org/missing", "", "HTTP 404", "check the name"),
        ("org/gated", "", "HTTP 401", "set HF_TOKEN"),
        ("org/forbidden", "secret", "HTTP 403", "accept its licence"),
        ("org/broken", "", "HTTP 500", "try again later"),
        ("org/junk", "", "not valid JSON", "JSON has no comments"),
        ("org/huge", "", "larger than 4 MiB", "check the id"),
    ],
)
def test_answers_that_are_no_config(server, monkeypatch, name, token, said, hint):
    monkeypatch.setenv("HF_TOKEN", token)
    e = refusal(name)
    assert said in e.message and hint in e.hint and "secret" not in str(e)


def test_a_slow_hub_is_given_up(server, monkeypatch):
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.1)
    assert "did not answer within 0.1 s" in refusal("org/slow").message


def test_no_network(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    e = refusal("org/tiny")
    assert "cannot be reached" in e.message and "config.json of the model" in e.hint


def test_offline_by_flag_and_by_variable(server, monkeypatch):
    assert "--offline" in refusal("org/tiny", offline=True).message
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused = refusal("org/tiny")
    assert "HF_HUB_OFFLINE forbids" in refused.message and refused.hint.startswith("unset HF_HUB_OFFLINE")
    assert server.seen == []


@pytest.mark.parametrize("endpoint", ["file:///etc", "ftp://x", "hub"])
def test_an_endpoint_must_be_a_web_address(server, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert "HF_ENDPOINT" in refusal("org/tiny").message


def test_an_id_is_not_a_path(server):
    assert "no hub id" in refusal("org/na me").message
    assert "does not exist" in refusal("a/b/c").message
