"""The Helm chart's values: their schema is the run spec's, and refuses what would be ignored."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from rendering import CHART, VALUES, changed

from argosy.launch.chart import files, values_schema
from argosy.launch.cluster_record import PORT


def test_the_generated_files_of_the_chart_are_those_of_the_code() -> None:
    for name, text in files().items():
        assert (CHART / name).read_text() == text, "make docs"


def test_the_values_fit_their_schema() -> None:
    jsonschema.Draft7Validator.check_schema(values_schema())
    jsonschema.validate(VALUES, values_schema(), jsonschema.Draft7Validator)


def test_the_example_needs_nothing_that_no_stage_brings() -> None:
    assert VALUES["run"]["data"]["tokenizer"].startswith("hf:")


def test_the_open_port_of_the_network_policy_is_the_readers() -> None:
    policy = (CHART / "templates" / "network.yaml").read_text()
    assert f"argosy/stage: read\n  policyTypes: [Ingress]\n  ingress:\n    - ports:\n        - port: {PORT}\n" in policy


@pytest.mark.parametrize(
    "parts",
    [
        {"run": {"modle": "gpt3-1.3b"}},
        {"run": {"model": "gpt3-1.3bb"}},
        {"run": {"cluster__node": 4}},
        {"run": {"cluster__target": "pytorch-job"}},
        {"claim": {"create": "yes"}},
        {"dashboard": {"prot": 1}},
        {"tensorboard": {"cpu": 1}},
    ],
)
def test_values_that_would_be_ignored_are_refused(parts: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed(**parts), values_schema(), jsonschema.Draft7Validator)
