"""The fault proxy against the real API server: what passes, and what is spoiled."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from testbed.api import Api, ApiError
from testbed.control_plane import ControlPlane
from testbed.fault_proxy import FaultProxy
from testbed.faults import answer, cut, delay, expired
from testbed.processes import wait_for

pytestmark = pytest.mark.cluster
JsonObject = dict[str, Any]
_MAPS = "/api/v1/namespaces/default/configmaps"


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    with FaultProxy(control_plane) as running:
        yield running


@pytest.fixture
def through(proxy: FaultProxy, control_plane: ControlPlane) -> Api:
    """The administrator's client, through the proxy."""
    keys = control_plane.credentials
    return Api(proxy.url, keys.client_context(), token=keys.admin_token)


class _Watch:
    """A watch by hand, to see bytes as they come."""

    def __init__(self, proxy: FaultProxy, control_plane: ControlPlane, version: str) -> None:
        keys = control_plane.credentials
        self._connection = http.client.HTTPSConnection(
            proxy.url.removeprefix("https://"), context=keys.client_context(), timeout=20
        )
        headers = {"Authorization": f"Bearer {keys.admin_token}"}
        path = f"{_MAPS}?watch=true&resourceVersion={version}"
        self._connection.request("GET", path, headers=headers)
        self.answer = self._connection.getresponse()

    def event(self) -> JsonObject:
        line = self.answer.readline()
        if not line:
            raise EOFError
        parsed: JsonObject = json.loads(line)
        return parsed


@pytest.fixture
def watch(proxy: FaultProxy, control_plane: ControlPlane, api: Api) -> _Watch:
    version = api.get(_MAPS)["metadata"]["resourceVersion"]
    return _Watch(proxy, control_plane, version)


@pytest.fixture
def make_map(api: Api) -> Iterator[Callable[[str], JsonObject]]:
    names: list[str] = []

    def make(name: str) -> JsonObject:
        names.append(name)
        return api.create(_MAPS, {"metadata": {"name": name}})

    yield make
    for name in names:
        api.delete(f"{_MAPS}/{name}")


def test_what_is_not_spoiled_passes_unchanged(
    proxy: FaultProxy, through: Api, api: Api, kubectl: Callable[..., str]
) -> None:
    assert through.get(f"{_MAPS}?limit=1") == api.get(f"{_MAPS}?limit=1")
    kubeconfig = proxy.admin_kubeconfig()
    kubectl("apply", "-f", "-", kubeconfig=kubeconfig, stdin=json.dumps(_a_map("passed")))
    assert "passed" in kubectl("get", "configmap", "-o", "name", kubeconfig=kubeconfig)
    assert through.delete(f"{_MAPS}/passed")
    wait_for(lambda: ("DELETE", 200) in [(seen.method, status) for seen, status in proxy.seen()])


def _a_map(name: str) -> JsonObject:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}


def test_an_agents_own_token_is_what_the_api_server_sees(
    proxy: FaultProxy, make_node: Callable[..., JsonObject], kubectl: Callable[..., str]
) -> None:
    make_node("proxied")
    kubeconfig = proxy.token_kubeconfig("default", "default", node="proxied")
    shown = json.loads(kubectl("auth", "whoami", "-o", "json", kubeconfig=kubeconfig))
    extra = shown["status"]["userInfo"]["extra"]
    assert extra["authentication.kubernetes.io/node-name"] == ["proxied"]


def test_a_watch_event_passes_at_once(watch: _Watch, make_map: Callable[[str], JsonObject]) -> None:
    for number in range(3):
        made = make_map(f"seen-{number}")
        start = time.monotonic()
        assert watch.event()["object"]["metadata"]["uid"] == made["metadata"]["uid"]
        assert time.monotonic() - start < 1


def test_a_watch_that_is_cut_ends_without_a_word(
    proxy: FaultProxy, watch: _Watch, make_map: Callable[[str], JsonObject]
) -> None:
    make_map("before-the-cut")
    watch.event()
    wait_for(proxy.watches)
    assert proxy.cut_watches("configmaps") == 1
    with pytest.raises((OSError, EOFError, http.client.HTTPException)):
        watch.event()
    wait_for(lambda: not proxy.watches(), why="the watch lives on behind the proxy")


def test_a_running_watch_can_expire(
    proxy: FaultProxy, watch: _Watch, make_map: Callable[[str], JsonObject]
) -> None:
    make_map("before-the-end")
    assert watch.event()["type"] == "ADDED"
    wait_for(proxy.watches)
    assert proxy.expire_watches() == 1
    last = watch.event()
    assert (last["type"], last["object"]["code"]) == ("ERROR", 410)
    assert last["object"]["reason"] == "Expired"
    with pytest.raises(EOFError):
        watch.event()


def test_new_watches_are_told_that_their_version_expired(
    proxy: FaultProxy, control_plane: ControlPlane
) -> None:
    with proxy.fault(expired(times=1)):
        first = _Watch(proxy, control_plane, "1")
        assert first.event()["object"]["code"] == 410
        second = _Watch(proxy, control_plane, "0")
        assert second.answer.status == 200
        wait_for(proxy.watches)


def test_a_throttled_request_is_told_when_to_come_back(proxy: FaultProxy, through: Api) -> None:
    with proxy.fault(answer(429, retry_after_s=3, times=1, methods=("GET",))):
        reply = through.request("GET", _MAPS)
        assert (reply.status, reply.headers["Retry-After"]) == (429, "3")
        assert reply.body["reason"] == "TooManyRequests"
        assert through.request("GET", _MAPS).status == 200


def test_a_share_of_the_requests_fails_and_never_reaches_the_server(
    proxy: FaultProxy, through: Api, api: Api
) -> None:
    refused: list[int] = []
    with proxy.fault(answer(500, share=0.5, methods=("POST",))):
        for number in range(20):
            try:
                through.create(_MAPS, {"metadata": {"name": f"share-{number}"}})
            except ApiError as error:
                refused.append(error.status)
    made = [m for m in api.get(_MAPS)["items"] if m["metadata"]["name"].startswith("share-")]
    for found in made:
        api.delete(f"{_MAPS}/{found['metadata']['name']}")
    assert set(refused) == {500}
    assert 0 < len(made) == 20 - len(refused)


def test_latency_is_added(proxy: FaultProxy, through: Api) -> None:
    with proxy.fault(delay(0.5)):
        start = time.monotonic()
        through.get("/version")
        assert time.monotonic() - start >= 0.5


def test_connections_are_cut_before_and_amid_requests(proxy: FaultProxy, through: Api) -> None:
    with proxy.fault(cut(times=1)):
        with pytest.raises(ConnectionError):
            through.get("/version")
    with proxy.fault(delay(20)), ThreadPoolExecutor() as pool:
        asking = pool.submit(through.get, "/version")
        assert wait_for(proxy.cut_connections) == 1
        with pytest.raises(ConnectionError):
            asking.result(timeout=5)
    assert through.get("/version")["major"] == "1"


def test_without_an_api_server_the_proxy_has_no_answer_either(
    private_control_plane: ControlPlane,
) -> None:
    keys = private_control_plane.credentials
    with FaultProxy(private_control_plane) as proxy:
        client = Api(proxy.url, keys.client_context(), token=keys.admin_token)
        assert client.get("/version")
        private_control_plane.kill_api_server()
        with pytest.raises(ConnectionError):
            client.get("/version")
        private_control_plane.start_api_server()
        assert client.get("/version")
