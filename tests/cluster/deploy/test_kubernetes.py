"""The Kubernetes manifests of cluster/deploy/: RayJobs, JobSet, claim, pod for files.

No test applies them to a Kubernetes cluster. Their fields are checked against
`kubernetes_schema.yaml`, which lists the fields and rules of the custom resource definitions.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from txl_dist import errors
from txl_dist.config.config_file import load_run_config

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "cluster" / "deploy"
SCHEMA = yaml.safe_load((Path(__file__).parent / "kubernetes_schema.yaml").read_text())
RAY_JOBS = [DEPLOY / "kuberay" / f"{name}.yaml" for name in ("train", "prepare", "eval")]
JOB_SET = DEPLOY / "jobset.yaml"
STORAGE = [DEPLOY / "kuberay" / f"{name}.yaml" for name in ("storage", "copy_files")]
MANIFESTS = [*RAY_JOBS, *STORAGE, JOB_SET]
KUEUE = DEPLOY / "kuberay" / "kueue.yaml"
END_SECONDS = 10
"""What a driver or rank may take to end after its grace period (launch/supervise.py: 3 s)."""
RESUMABLE = 75

by_name = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
ray_jobs = pytest.mark.parametrize("path", RAY_JOBS, ids=lambda path: path.stem)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def validate(manifest: dict[str, Any]) -> None:
    schema = {"$ref": f"#/definitions/{manifest['kind']}", "definitions": SCHEMA["definitions"]}
    jsonschema.validate(manifest, schema, cls=jsonschema.Draft7Validator)


def queued(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the JSON patch of kueue.yaml, as `kubectl patch --local` applies it."""
    for operation in yaml.safe_load(KUEUE.read_text()):
        *parents, key = operation["path"].strip("/").split("/")
        node = manifest
        for parent in parents:
            node = node[parent]
        if operation["op"] == "remove":
            del node[key]
        else:
            assert operation["op"] == "add"
            node[key] = operation["value"]
    return manifest


def pod_specs(node: Any) -> Iterator[dict[str, Any]]:
    """Every pod template's `spec` in a manifest."""
    if isinstance(node, dict) and "containers" in node:
        yield node
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from pod_specs(child)


def grace_seconds(words: list[str]) -> float:
    """`training.grace_seconds` of a command line; the image has the configs in /opt/txl."""
    [config] = [word for word in words if word.endswith(".yaml")]
    path = ROOT / Path(config).relative_to("/opt/txl")
    return load_run_config(path, [word for word in words if "=" in word]).training.grace_seconds


@by_name
def test_every_field_exists_and_has_its_type(path: Path) -> None:
    validate(load(path))


@ray_jobs
def test_the_queued_job_is_what_kuberay_and_kueue_accept(path: Path) -> None:
    manifest = queued(load(path))
    validate(manifest)
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert manifest["spec"]["suspend"]
    assert manifest["spec"]["shutdownAfterJobFinishes"]


@by_name
def test_pods_run_without_privileges_and_without_secrets_in_the_manifest(path: Path) -> None:
    for pod in pod_specs(load(path)):
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            for variable in container.get("env", []):
                is_secret = any(
                    word in variable["name"] for word in ("TOKEN", "PASSWORD", "SECRET")
                )
                assert not is_secret or "valueFrom" in variable


@ray_jobs
def test_ranks_and_workers_fit_the_worker_pods_and_the_head_is_not_exposed(path: Path) -> None:
    spec = load(path)["spec"]["rayClusterSpec"]
    assert spec["authOptions"]["mode"] == "token"
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    [group] = spec["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    [container] = group["template"]["spec"]["containers"]
    resources = container["resources"]
    gpus = resources["limits"].get("nvidia.com/gpu")
    per_pod = int(gpus if gpus is not None else resources["requests"]["cpu"])
    words = load(path)["spec"]["entrypoint"].split()
    option = "--ranks" if "--ranks" in words else "--workers"
    assert int(words[words.index(option) + 1]) == group["replicas"] * per_pod


@ray_jobs
def test_a_pod_of_ray_is_deleted_after_its_ranks_have_saved(path: Path) -> None:
    words = load(path)["spec"]["entrypoint"].split()
    grace = grace_seconds(words) if words[1] == "train" else 0
    for pod in pod_specs(load(path)):
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:4] == ["python", "-P", "-m", "cluster.drain_node"]
        drain = float(command[command.index("--deadline-seconds") + 1])
        assert grace + END_SECONDS <= drain
        assert drain + END_SECONDS <= pod["terminationGracePeriodSeconds"]


def test_ray_waits_for_a_job_that_it_stops() -> None:
    spec = load(RAY_JOBS[0])["spec"]
    [head] = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    wait = {variable["name"]: variable["value"] for variable in head["env"]}
    grace = grace_seconds(spec["entrypoint"].split())
    assert grace + END_SECONDS <= int(wait["RAY_JOB_STOP_WAIT_TIME_S"])


def test_a_pod_of_the_job_set_is_deleted_after_its_ranks_have_saved() -> None:
    [pod] = pod_specs(load(JOB_SET))
    [container] = pod["containers"]
    assert grace_seconds(container["args"]) + END_SECONDS <= pod["terminationGracePeriodSeconds"]


def test_the_job_set_repeats_stopped_runs_and_not_those_that_would_fail_again() -> None:
    manifest = load(JOB_SET)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    actions = {
        code: rule["action"]
        for rule in reversed(job["podFailurePolicy"]["rules"])  # the first rule that matches counts
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    exit_codes = {
        error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.TxlError)
    }
    permanent = exit_codes - {1, RESUMABLE}
    assert actions == {RESUMABLE: "Ignore"} | dict.fromkeys(permanent, "FailJob")
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    [rule] = manifest["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_the_ranks_of_the_job_set_find_each_other() -> None:
    manifest = load(JOB_SET)
    [replicated] = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    variables = {variable["name"]: variable for variable in container["env"]}
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == int(variables["NUM_HOSTS"]["value"])
    name = manifest["metadata"]["name"]
    # <jobSet.name>-<replicatedJob.name>-<job-index>-<pod-index>.<subdomain> (jobset_types.go)
    assert variables["MASTER_ADDR"]["value"] == f"{name}-{replicated['name']}-0-0.{name}"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(variables["RANKS_PER_HOST"]["value"]) == gpus
