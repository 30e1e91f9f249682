"""Mask email and IP addresses, with the matches of datatrove's PIIFormatter.

Every address of a kind gets the same replacement. datatrove takes its replacements in turn, so its output depends on which worker
saw how many addresses before.
"""

from __future__ import annotations

import ipaddress
import re

from argosy.data.curate.curation_step import CurationStep, StepResult
from argosy.data.curate.text_batch import TextBatch

# RFC 5322: atoms joined by dots, then the labels of a domain, or an IPv4 address in brackets.
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
_LITERAL = rf"\[(?:{_OCTET}\.){{3}}(?:{_OCTET}|[A-Za-z0-9-]*[A-Za-z0-9]:)\]"
# The three parts of an address. The first also matches atoms from back to front.
_ATOMS = re.compile(rf"{_ATOM}+(?:\.{_ATOM}+)*")
_BEGIN = re.compile(rf"\b{_ATOM}")
_DOMAIN = re.compile(rf"(?:{_LABEL}\.)+{_LABEL}|{_LITERAL}")
_ADDRESS = re.compile(rf"(?:{_OCTET}\.){{3}}{_OCTET}")
# Cheap to search for, and part of every IPv4 address.
_MAYBE_ADDRESS = re.compile(r"\d\.\d{1,3}\.\d{1,3}\.\d", re.ASCII)


class Step(CurationStep):
    """Replace email addresses and public IPv4 addresses."""

    emails: bool = True
    ips: bool = True
    only_public_ips: bool = True
    email_replacement: str = "email@example.com"
    ip_replacement: str = "22.214.171.124"

    def apply(self, batch: TextBatch) -> StepResult:
        result = StepResult()
        for number in batch.living():
            text = masked = batch.texts[number]
            if self.emails and "@" in text:
                masked = masked_emails(masked, self.email_replacement)
            if self.ips and _MAYBE_ADDRESS.search(masked):
                masked = _ADDRESS.sub(self._masked_address, masked)
            if masked != text:
                result.changed[number] = masked
        return result

    def _masked_address(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match.group())
        except ValueError:
            return match.group()
        return self.ip_replacement if address.is_global or not self.only_public_ips else match.group()


def masked_emails(text: str, replacement: str) -> str:
    """Replace email addresses.

    A search for the whole pattern tries every character of a long run, such as base64, as the beginning of an address. This one looks
    from each @ forward for the domain and back for the atoms, so its time is linear in the length of the text.
    """
    pieces, done, before, at = [], 0, 0, text.find("@")
    while at >= 0:
        domain = _DOMAIN.match(text, at + 1)
        atoms = domain and _ATOMS.match(text[before:at][::-1])
        begin = atoms and _BEGIN.search(text, at - atoms.end(), at)
        before = at + 1
        if domain and begin:
            pieces += [text[done : begin.start()], replacement]
            done = before = domain.end()
        at = text.find("@", before)
    return "".join([*pieces, text[done:]])
