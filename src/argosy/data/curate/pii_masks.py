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
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
_LITERAL = rf"\[(?:{_OCTET}\.){{3}}(?:{_OCTET}|[A-Za-z0-9-]*[A-Za-z0-9]:)\]"
_EMAIL = re.compile(rf"\b{_ATOM}(?:\.{_ATOM})*@(?:(?:{_LABEL}\.)+{_LABEL}|{_LITERAL})")
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
                masked = _EMAIL.sub(lambda _: self.email_replacement, masked)
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
