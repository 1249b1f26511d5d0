"""Findings as text and for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zerobench.doctor.finding import Finding


def verdict(findings: Sequence[Finding]) -> str:
    """Return one line: how many findings of each level there are."""
    counted = Counter(finding.level for finding in findings)
    parts = [
        f"{counted[level]} {level}{'s' if counted[level] != 1 else ''}"
        for level in ("error", "warning", "note")
        if counted[level]
    ]
    return ", ".join(parts) if parts else "nothing found"


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return the verdict, then each finding with its cost and its cure."""
    lines = [verdict(findings)]
    for finding in findings:
        lines += [
            "",
            f"{finding.level}: {finding.subject}: {finding.what}",
            f"  costs: {finding.cost}",
            f"  cure:  {finding.cure}",
        ]
    return lines


def findings_content(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings, ready for JSON."""
    return {"findings": [asdict(finding) for finding in findings]}
