"""Whatever the OpenAPI document allows, or nearly allows, is never answered with a 5xx."""

import pytest
import schemathesis
from gateway_kit import Serve
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

EXAMPLES = 30
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.mark.slow
def test_no_server_error(serve: Serve):
    gateway = serve("--key", "")
    document = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    found = [
        r.ok() for r in document.exclude(path="/api/rollouts/stream").get_all_operations() if isinstance(r, Ok)
    ]
    assert len(found) > 15
    for operation in found:
        takes_input = bool(operation.body) or bool(operation.query) or bool(operation.path_parameters)
        for mode in GenerationMode if takes_input else (GenerationMode.POSITIVE,):

            @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=SLOW, database=None)
            @given(operation.as_strategy(generation_mode=mode))
            def send(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=[not_a_server_error])

            send()
