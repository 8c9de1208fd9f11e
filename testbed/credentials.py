"""The keys of a cluster, and kubeconfigs for whoever a test wants to be."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Sequence
from pathlib import Path

from testbed.api import Api
from testbed.kubeconfig import kubeconfig_text, write_private
from testbed.pki import Authority, KeyPair, service_account_keys
from testbed.tokens import service_account_token

__all__ = ["HOST_FROM_GUEST", "Credentials"]

HOST_FROM_GUEST = "10.0.2.2"
"""This machine's loopback as a virtual machine of QEMU's user network sees it."""
_SERVICE_ADDRESS = "10.96.0.1"
_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)
_ADMINS = "system:masters"


class Credentials:
    """One authority for everything; all files are below the cluster's private folder."""

    def __init__(self, folder: Path, url: str, address: str) -> None:
        self._folder = folder
        self._url = url
        self._authority = Authority()
        self.admin_token = secrets.token_urlsafe(32)
        """For administrators behind a proxy, where a client certificate does not get through."""
        self._write_keys(address)
        self.admin_kubeconfig = self.for_user("admin", groups=[_ADMINS])
        """Path of the administrator's kubeconfig."""

    @property
    def ca(self) -> bytes:
        """The authority's certificate, PEM."""
        return self._authority.pem.public

    def client_context(self) -> ssl.SSLContext:
        """TLS settings of a client that trusts this cluster and is nobody."""
        return ssl.create_default_context(cadata=self.ca.decode())

    def admin_context(self) -> ssl.SSLContext:
        """TLS settings of the administrator."""
        context = self.client_context()
        pki = self._folder / "pki"
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        return context

    def server_context(self, address: str) -> ssl.SSLContext:
        """TLS settings of a server that this cluster's clients trust, such as a proxy."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        crt, key = self._issue("proxy", addresses=[address, "localhost"])
        context.load_cert_chain(crt, key)
        return context

    def for_user(self, user: str, *, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig of a user by client certificate, such as `system:node:a`."""
        return self._write(user, self.user_text(user, groups=groups))

    def user_text(self, user: str, *, groups: Sequence[str] = (), server: str | None = None) -> str:
        """The text of such a kubeconfig; `server` is the API server as the user reaches it."""
        pair = self._authority.issue(user, groups=groups)
        return kubeconfig_text(server or self._url, self.ca, certificate=pair)

    def server_keys(self, name: str, *, addresses: Sequence[str]) -> KeyPair:
        """A certificate for a server elsewhere, such as a kubelet in a virtual machine."""
        return self._authority.issue(name, addresses=addresses)

    def for_token(self, name: str, token: str, *, server: str | None = None) -> Path:
        """A kubeconfig with a bearer token; `server` names a proxy in front of the API server."""
        text = kubeconfig_text(server or self._url, self.ca, token=token)
        return self._write(f"{name}-{secrets.token_hex(3)}", text)

    def for_service_account(
        self,
        api: Api,
        namespace: str,
        name: str,
        *,
        node: str | None = None,
        pod: str | None = None,
        server: str | None = None,
    ) -> Path:
        """A kubeconfig with a new token of a ServiceAccount, see `service_account_token`."""
        token = service_account_token(api, namespace, name, node=node, pod=pod)
        return self.for_token(f"{namespace}-{name}", token, server=server)

    def _write(self, name: str, text: str) -> Path:
        folder = self._folder / "kubeconfigs"
        folder.mkdir(exist_ok=True)
        return write_private(folder / f"{name.replace(':', '-')}.kubeconfig", text)

    def _write_keys(self, address: str) -> None:
        pki = self._folder / "pki"
        pki.mkdir()
        accounts = service_account_keys()
        write_private(pki / "sa.pub", accounts.public)
        write_private(pki / "sa.key", accounts.private)
        write_private(pki / "ca.crt", self.ca)
        write_private(pki / "ca.key", self._authority.pem.private)
        self._issue("server", addresses=[address, _SERVICE_ADDRESS, HOST_FROM_GUEST, *_NAMES])
        self._issue("admin", groups=[_ADMINS])
        line = f'{self.admin_token},admin,admin,"{_ADMINS}"\n'
        write_private(pki / "tokens.csv", line)

    def _issue(
        self, name: str, *, groups: Sequence[str] = (), addresses: Sequence[str] = ()
    ) -> tuple[Path, Path]:
        pair = self._authority.issue(name, groups=groups, addresses=addresses)
        pki = self._folder / "pki"
        return (
            write_private(pki / f"{name}.crt", pair.public),
            write_private(pki / f"{name}.key", pair.private),
        )
