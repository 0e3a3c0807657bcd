"""The certificate authority of one sandbox: it lives in the memory of the egress, and certifies a host when a client asks for it."""

from __future__ import annotations

import datetime
import os
import ssl
from functools import lru_cache
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)


class Authority:
    """Issues certificates for names. Its key never leaves this object."""

    def __init__(self, now: datetime.datetime) -> None:
        self._now = now
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Agent Sandbox, one run, {os.urandom(6).hex()}")])
        usage = x509.KeyUsage(
            False, False, False, False, False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False
        )
        self._certificate = (
            self._builder(name, name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.context_for = lru_cache(maxsize=256)(self._context_for)

    @property
    def certificate(self) -> bytes:
        """The authority's own certificate, which clients inside are to trust, as PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def _builder(self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(self._now - _DAY).not_valid_after(self._now + 7 * _DAY)

    def _context_for(self, name: str) -> ssl.SSLContext:
        """Return a context that shows clients a certificate for this canonical name."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        leaf = (
            self._builder(subject, self._certificate.subject, self._leaf_key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([_general(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = self._leaf_key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2", "http/1.1"])
        _load(context, leaf.public_bytes(serialization.Encoding.PEM) + private)
        return context


def new_authority() -> Authority:
    """Return an authority for one run."""
    return Authority(datetime.datetime.now(datetime.UTC))


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _load(context: ssl.SSLContext, chain: bytes) -> None:
    """Load a certificate and its key from memory: the standard library only reads files, and the egress has none."""
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, chain)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
