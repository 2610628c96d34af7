"""Certificates for tests: an authority, and files as an operator has them."""

from __future__ import annotations

import os
from pathlib import Path

import trustme

from specdec.client.tls_files import Contents, TlsFiles


class Authority:
    """An authority that writes what it issues into a folder."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.file = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """Issue a certificate for these hosts; return its file and the key's. What had the name before is replaced,
        each file at once."""
        issued = self._authority.issue_cert(*(hosts or ("127.0.0.1",)), common_name=name)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
        for file, content in ((key, issued.private_key_pem.bytes()), (certificate, chain)):
            new = file.with_suffix(".new")
            new.write_bytes(content)
            os.replace(new, file)
        return certificate, key

    def files(self, name: str, *hosts: str) -> TlsFiles:
        """Return the files of a server or client that shows a certificate, and wants one of its peers."""
        return TlsFiles(*self.issue(name, *hosts), self.file)

    def contents(self, name: str, *hosts: str) -> Contents:
        """Return what a client with a certificate of this name needs."""
        certificate, key = self.issue(name, *hosts)
        return Contents(certificate.read_bytes(), key.read_bytes(), self.file.read_bytes())
