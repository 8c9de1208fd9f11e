"""Who may speak to the API server: a PKI, kubeconfig files, service-account tokens, RBAC."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
import os
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from testbed.api import Api

_VALID = dt.timedelta(days=30)
_CLOCK_SLACK = dt.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate, or a public key, and the private key that goes with it, as PEM."""

    public: bytes
    private: bytes


class Authority:
    """A certificate authority that lives as long as its cluster."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hostprep-testbed")])
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        builder = builder.add_extension(_signing_usage(), True)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> KeyPair:
        """The authority itself."""
        return KeyPair(_pem(self._certificate), _private_pem(self._key))

    def issue(
        self, user: str, *, groups: Sequence[str] = (), addresses: Sequence[str] = ()
    ) -> KeyPair:
        """A certificate for a user of the cluster, or for a server with names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        attributes.append(x509.NameAttribute(NameOID.COMMON_NAME, user))
        builder = _builder(x509.Name(attributes), self._name, key.public_key())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if addresses:
            usages = [ExtendedKeyUsageOID.SERVER_AUTH, *usages]
            names = x509.SubjectAlternativeName([_general_name(a) for a in addresses])
            builder = builder.add_extension(names, False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
        return KeyPair(_pem(builder.sign(self._key, hashes.SHA256())), _private_pem(key))


def service_account_keys() -> KeyPair:
    """The pair that signs and checks service-account tokens."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return KeyPair(public, _private_pem(key))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SLACK)
        .not_valid_after(now + _VALID)
    )


def _signing_usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def kubeconfig_text(
    server: str, ca: bytes, *, token: str | None = None, certificate: KeyPair | None = None
) -> str:
    """A kubeconfig (JSON is YAML) for one cluster and one user."""
    user: dict[str, str] = {}
    if token is not None:
        user["token"] = token
    if certificate is not None:
        user["client-certificate-data"] = _base64(certificate.public)
        user["client-key-data"] = _base64(certificate.private)
    cluster = {"server": server, "certificate-authority-data": _base64(ca)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "testbed", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "user"}}],
        "current-context": "testbed",
    }
    return json.dumps(config, indent=1)


def write_private(path: Path, content: str | bytes) -> Path:
    """Write a file that only its owner may read."""
    data = content.encode() if isinstance(content, str) else content
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    return path


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


_LIFE_SECONDS = 24 * 3600


def service_account_token(
    api: Api,
    namespace: str,
    service_account: str,
    *,
    node: str | None = None,
    pod: str | None = None,
) -> str:
    """Ask the API server for a token of a ServiceAccount, for a day.

    With `node` it carries that node's name and UID as claims (Kubernetes >= 1.32; this is what
    `kubectl create token --bound-object-kind Node` does). With `pod`, a Pod of the namespace,
    it carries the pod's claims and those of the node it is bound to, as in a container.
    Raises ApiError when one of them does not exist.
    """
    spec: dict[str, object] = {"expirationSeconds": _LIFE_SECONDS}
    if node is not None:
        spec["boundObjectRef"] = _reference(api, "Node", node, f"/api/v1/nodes/{node}")
    if pod is not None:
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        spec["boundObjectRef"] = _reference(api, "Pod", pod, path)
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    token: str = api.create(path, request)["status"]["token"]
    return token


def _reference(api: Api, kind: str, name: str, path: str) -> dict[str, str]:
    uid = api.get(path)["metadata"]["uid"]
    return {"apiVersion": "v1", "kind": kind, "name": name, "uid": uid}


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
