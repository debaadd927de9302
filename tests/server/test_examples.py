"""The files of examples/serving name what the server has: metrics, options, paths."""

import asyncio
import json
import re

import pytest
import yaml

from tests.architecture.test_house import ROOT
from tests.cli.helpers import paceline
from tests.server.helpers import ASK, server

FOLDER = ROOT / "examples" / "serving"


def test_the_dashboard_shows_metrics_that_exist():
    async def metrics():
        async with server() as client:
            await client.post("/v1/chat/completions", json=ASK)
            return (await client.get("/metrics")).text

    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for query in queries for name in re.findall(r"paceline:\w+", query)}
    found = asyncio.run(metrics())
    assert len(names) > 8
    assert not [name for name in names if f"\n{name}{{" not in f"\n{found}"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for query in queries:
        assert all(query.count(pair[0]) == query.count(pair[1]) for pair in ("()", "{}", "[]"))


@pytest.fixture(scope="module")
def manifest():
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}


def test_the_manifest_gives_options_and_paths_that_exist(manifest):
    pod = manifest["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = yaml.safe_load(manifest["ConfigMap"]["data"]["serve.yaml"])
    help_text = paceline("serve", "--help", env={"COLUMNS": "200"}).stdout
    options = [word for word in container["command"] if word.startswith("--")] + [f"--{key}" for key in given]
    assert not [one for one in options if one != "--model" and one not in help_text]

    async def probed():
        async with server() as client:
            probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
            return [(await client.get(path)).status_code for path in probes]

    assert asyncio.run(probed()) == [200] * 3
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] > pause + given["drain-timeout"] + 5, "uvicorn closes for 5 s"
    assert manifest["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]


def test_the_image_starts_with_options_that_exist():
    text = (FOLDER / "Dockerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.M)
    words = json.loads(entry)
    help_text = paceline("serve", "--help", env={"COLUMNS": "200"}).stdout
    assert words[:2] == ["paceline", "serve"]
    assert not [word for word in words if word.startswith("--") and word not in help_text]
    assert "0.0.0.0" in words
