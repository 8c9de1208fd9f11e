"""Certificates for a throw-away cluster: one authority, and whatever it signs.

They have no key identifiers, as those of some clusters out there: Python 3.13 refuses these unless
told otherwise, and our programs must not.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["Authority", "KeyPair", "service_account_keys"]

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
