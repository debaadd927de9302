"""The files of examples/serving name what the server has: metrics, options, paths."""

import asyncio
import configparser
import json
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest
import yaml
from typer.main import get_command

from paceline.cli.app import app
from tests.architecture.test_house import ROOT
from tests.cli.helpers import paceline
from tests.server.helpers import ASK, server

FOLDER = ROOT / "examples" / "serving"
COMMANDS = get_command(app).commands


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


def sent(path: str) -> bool:
    """Whether Docker sends a file to the build, by .dockerignore: the last pattern that fits decides."""
    is_sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        parents = [path, *map(str, PurePosixPath(path).parents)]
        fits = any(fnmatch(f"/{one}", f"*/{pattern.removeprefix('**/')}") if "**" in line else fnmatch(one, pattern)
                   for one in parents if one != ".")  # fmt: skip
        if fits and not line.startswith("#"):
            is_sent = line.startswith("!")
    return is_sent


def test_the_image_is_sent_what_the_wheels_need_and_nothing_else():
    assert not [
        one for one in (".git/objects/pack/a.pack", ".venv/bin/python", "tests/x.py", "docs/api.md") if sent(one)
    ]
    assert not [one for one in ("paceline/kernels/libpaceline.so", "paceline/cli/__pycache__/app.pyc") if sent(one)]
    needed = ["README.md", "LICENSE", "pyproject.toml", "hatch_build.py"]
    needed += [f"models/{name}" for name in ("README.md", "LICENSE", "pyproject.toml", "paceline_zoo/__init__.py")]
    tracked = subprocess.run(
        ["git", "ls-files", "paceline", "models"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not [one for one in (*needed, *tracked.stdout.split()) if not sent(one)]


def test_the_unit_starts_with_options_that_exist_and_leaves_time_to_drain():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # systemd's keys are case-sensitive
    unit.read(FOLDER / "paceline.service")
    words = unit["Service"]["ExecStart"].split()
    help_text = paceline("serve", "--help", env={"COLUMNS": "200"}).stdout
    assert words[1] == "serve"
    assert not [word for word in words if word.startswith("--") and word not in help_text]
    (config,) = [word for word in words if word.endswith(".yaml")]
    copied = re.findall(r"cp (\S+) /etc/paceline/", (FOLDER / "paceline.service").read_text())
    assert [Path(one).name for one in copied] == [Path(config).name]
    assert all((ROOT / one).is_file() for one in copied)
    assert [*COMMANDS["serve"].make_context("serve", ["--config", str(ROOT / copied[0])]).params["model"]] == [
        "smollm2-135m"
    ]
    drain = int(words[words.index("--drain-timeout") + 1])
    assert int(unit["Service"]["TimeoutStopSec"]) > drain + 5, "uvicorn closes for 5 s"


def test_the_services_of_compose_find_each_other():
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    services, configs = compose["services"], compose["configs"]
    used = [one["source"] for service in services.values() for one in service.get("configs", ())]
    assert sorted(used) == sorted(configs)
    (job,) = yaml.safe_load(configs["prometheus"]["content"])["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert services[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (source,) = yaml.safe_load(configs["datasource"]["content"])["datasources"]
    assert source["url"].split("/")[2].split(":")[0] in services
    (provider,) = yaml.safe_load(configs["dashboards"]["content"])["providers"]
    (mounted,) = services["grafana"]["volumes"]
    here, there, _ = mounted.split(":")
    assert (FOLDER / here).is_file()
    assert there.startswith(provider["options"]["path"])
    build = services["paceline"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()
    named = {volume.split(":")[0] for service in services.values() for volume in service["volumes"]}
    assert {name for name in named if not name.startswith(".")} == {*compose["volumes"]}
