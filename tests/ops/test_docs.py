"""Documents that speak of what the code has: alerts, commands, settings, links."""

import re
from pathlib import Path

import pytest
import yaml

from kvloop.cli.main import _COMMANDS
from kvloop.decode.settings import DecodeSettings
from kvloop.gateway.settings import GatewaySettings
from kvloop.prefill.settings import PrefillSettings
from kvloop.router.settings import RouterSettings
from kvloop.runtime.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = {
    name
    for model in (RouterSettings, GatewaySettings, PrefillSettings, DecodeSettings)
    for name in model.model_fields
}


def rows_of(page: str) -> set[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return set(re.findall(r"^\| `(Kvloop\w+)` \|(?:[^|]+\|){3}$", text, re.MULTILINE))


def test_every_alert_has_a_row_in_the_handbook() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert rows_of("failures.md") == alerts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_pages_name_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (page.parent / link).exists(), link
    for command in re.findall(r"`kvloop ([a-z-]+)", text):
        assert command in _COMMANDS, command
    known = {name for metric in CATALOGUE for name in (*metric.series, metric.exposed)}
    for metric in re.findall(r"`(kvloop_[a-z_]+)`", text):
        assert metric in known, metric
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), (
            target
        )
    for path in re.findall(r"`((?:deploy|services|tests|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_settings_that_the_tuning_page_names_exist() -> None:
    text = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text))
    assert {name for name in named if not name.startswith("kvloop_")} <= SETTINGS
