# Two commands set everything up: `make bench` and `make test`.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
ARGS   ?= -m stages=2,4,8 micro=4,16,32

.PHONY: bench test faults kills soak perf levers peers readme-results clean

bench: $(VENV)/.bench
	$(PY) -m pipebench $(ARGS)

# Two files of tests at once, for much of what starts processes waits for them; then what must have the machine to itself.
test: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest --numprocesses 2 --dist loadfile -m "not alone"
	$(PY) -m pytest -m alone

faults: $(VENV)/.test
	$(PY) -m pytest tests -m fault --faults-table results/faults/faults.md

kills: $(VENV)/.test
	PIPEBENCH_KILLS=20 $(PY) -m pytest tests/end_to_end/test_stopped_sweeps.py -k killed

# Two hundred points in one sweep; the tests run fifteen.
soak: $(VENV)/.test
	PIPEBENCH_SOAK_POINTS=200 $(PY) -m pytest tests/end_to_end/test_soak.py

readme-results: $(VENV)/.bench
	$(PY) -m pipebench.schedule gpipe,1f1b,interleaved,zb_v 4 8 --svg results/schedules.svg >/dev/null
	for sweep in results/*/sweep.json; do $(PY) -m pipebench.report $$(dirname $$sweep) || exit; done
	$(PY) -m pipebench.report.embed README.md

perf: $(VENV)/.bench
	$(PY) -m pipebench.perf

# What each choice inside the built-in engine brings, one changed at a time. torch.compile among them takes a C++ compiler.
levers: $(VENV)/.bench
	$(PY) -m pipebench.perf.ablation

# Other engines beside the built-in one: half an hour on two cores. Each ends with its tables; results/ keeps such runs.
peers: $(VENV)/.peers
	$(PY) -m pipebench -m experiment=peers
	$(PY) -m pipebench -m experiment=peers_mlp

$(PY):
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); \
	  sys.exit(0 if ok else f"Python {sys.version.split()[0]}: expected 3.11 to 3.13; name one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.bench: pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

# Both peers take the torch that is pinned. DeepSpeed comes as source; pip builds it in an environment of its own,
# where its setup does without torch. With --no-build-isolation a fresh Python 3.11 lacks bdist_wheel and it fails.
# DS_BUILD_OPS=0: none of its compiled operations is needed, and a machine without a compiler will do.
$(VENV)/.peers: pyproject.toml constraints.txt | $(PY)
	DS_BUILD_OPS=0 $(PY) -m pip install --quiet --constraint constraints.txt --editable '.[peers]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(PY)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
