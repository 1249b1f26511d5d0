"""Assembly of the page: templates, scripts and the policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from zerobench.page.section import Section, section_of
from zerobench.results.schema import Results


def page_text(sources: Sequence[tuple[str, Results]]) -> str:
    """Return the HTML of result files, each with its title."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    sections = [section_of(title, results) for title, results in sources]
    scripts = [_charting_library(), _asset("page.js")]
    style = _asset("page.css")
    environment = Environment(
        loader=PackageLoader("zerobench.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        sections=sections,
        scripts=[Markup(script) for script in scripts],
        style=Markup(style),
        data=Markup(data_block(_specs(sections))),
        policy=_policy(scripts, style),
    )


def data_block(value: Any) -> str:
    """Return JSON that stays inside its script element whatever its strings are. It holds no infinite numbers."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _specs(sections: Sequence[Section]) -> dict[str, Any]:
    """Return the charts by the id of their place in the page."""
    return {
        f"s{section_at}-g{group_at}-c{chart_at}": chart.full_spec()
        for section_at, section in enumerate(sections, 1)
        for group_at, group in enumerate(section.groups, 1)
        for chart_at, chart in enumerate(group.charts, 1)
    }


def _charting_library() -> str:
    """Return Vega, Vega-Lite and vega-embed with its interpreter, as one script."""
    import vl_convert

    bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # whose stub wants a snippet
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _asset(name: str) -> str:
    return (files("zerobench.page") / "templates" / name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str], style: str) -> str:
    """Return a Content-Security-Policy that allows what the page holds, by hash, and no request."""
    allowed = " ".join(map(_hash, scripts))
    return f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
