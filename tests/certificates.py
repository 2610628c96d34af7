"""Certificates for tests: an authority, and files as an operator has them."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from specdec.wire.tls_files import Contents, TlsFiles


class Authority:
    """A certificate authority that writes certificates into a folder."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.file = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """Issue a certificate for these hosts; return its file and the key's. Existing files of that name are
        replaced, each atomically."""
        issued = self._authority.issue_cert(*(hosts or ("127.0.0.1",)), common_name=name)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
        for file, content in ((key, issued.private_key_pem.bytes()), (certificate, chain)):
            new = file.with_suffix(".new")
            new.write_bytes(content)
            os.replace(new, file)
        return certificate, key

    def issue_with(self, name: str, *names: x509.GeneralName) -> Contents:
        """Issue a certificate with any subject alternative names; return the TLS contents of a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.load_pem_x509_certificate(self._authority.cert_pem.bytes())
        signing: Any = serialization.load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(issuer.subject, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return Contents(builder.sign(signing, hashes.SHA256()).public_bytes(pem), private, self.file.read_bytes())

    def files(self, name: str, *hosts: str) -> TlsFiles:
        """Issue a certificate; return the TLS files of a server or client with mutual authentication."""
        return TlsFiles(*self.issue(name, *hosts), self.file)

    def contents(self, name: str, *hosts: str) -> Contents:
        """Issue a certificate; return the TLS contents of a client."""
        certificate, key = self.issue(name, *hosts)
        return Contents(certificate.read_bytes(), key.read_bytes(), self.file.read_bytes())
