# What can be done here. "make help" lists it.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export GOFLAGS ?=

PREFIX  ?= /usr/local
DESTDIR ?=
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
COMMIT  ?= $(shell git rev-parse HEAD 2>/dev/null)

.PHONY: help build install image test retest lint demo bench microbench figures pgo chaos compare mutants model simulate simulate-test partition-test ha-test suite-test cgroup-test compose-test alerts-test page-test consul postgres rabbitmq chromium clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

build: ## Build bin/onejob
	go build -ldflags "-X onejob/internal/cli.release=$(VERSION) -X onejob/internal/cli.commit=$(COMMIT)" -o bin/onejob ./cmd/onejob

install: build ## Install the binary, manual pages and completions (PREFIX=/usr/local DESTDIR=)
	install -D -m 755 bin/onejob '$(DESTDIR)$(PREFIX)/bin/onejob'
	rm -rf bin/man && env -i bin/onejob man bin/man
	install -d '$(DESTDIR)$(PREFIX)/share/man/man1'
	install -m 644 bin/man/*.1 '$(DESTDIR)$(PREFIX)/share/man/man1'
	bin/onejob completion bash | install -D -m 644 /dev/stdin '$(DESTDIR)$(PREFIX)/share/bash-completion/completions/onejob'
	bin/onejob completion zsh  | install -D -m 644 /dev/stdin '$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_onejob'
	bin/onejob completion fish | install -D -m 644 /dev/stdin '$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/onejob.fish'

image: ## Build the container image onejob
	docker build --build-arg VERSION=$(VERSION) --build-arg COMMIT=$(COMMIT) -t onejob .

demo: ## Three replicas, one killed in the middle of its work: see the takeover (2 minutes at most; DEMO=hold stays until Ctrl-C)
	@$(MAKE) -s build consul postgres >/dev/null
	@./scripts/demo.sh

# Without the profile of cmd/onejob: with it, everything that its test imports is compiled twice. Tests of
# the bench build the daemon, so they have the flag in their environment.
test: consul postgres rabbitmq ## Run all tests, against real servers, under the race detector
	go test -race -pgo=off -timeout 40m $(AT_ONCE) $(LONGEST) ./...
	cd bench && GOFLAGS="$(GOFLAGS) -pgo=off" go test -timeout 20m ./...

# Without vet, which make lint runs.
retest: consul postgres rabbitmq bin/gotestsum ## The same, and what failed up to twice more, alone: for a machine that others slow down
	bin/gotestsum --format pkgname $(RERUN) --packages '$(LONGEST) ./...' -- -race -pgo=off -vet=off -timeout 60m $(AT_ONCE)
	cd bench && GOFLAGS="$(GOFLAGS) -pgo=off" ../bin/gotestsum --format pkgname $(RERUN) --packages ./... -- -vet=off -timeout 20m

# Go tests packages in this order, and here half as many again at a time as there are processors: most
# tests wait for something. None of these is left alone at the end.
LONGEST = ./worker ./store ./lock/... ./internal/cli
AT_ONCE = -p $(shell echo $$(($$(nproc) + ($$(nproc) + 1) / 2)))

# At most thirty tests, a subtest and its test being two; not one with a data race, and no package that ends in a panic, or fails otherwise
# than by a test.
RERUN = --rerun-fails=2 --rerun-fails-max-failures=30 --rerun-fails-abort-on-data-race --rerun-fails-run-root-test \
	--jsonfile $(CURDIR)/bin/retest.json --post-run-command $(CURDIR)/scripts/retest-check.sh

bin/gotestsum: tools/lint/go.mod
	cd tools/lint && go build -o ../../$@ gotest.tools/gotestsum

bench: consul postgres ## Measure speed beside River and others (half an hour; leave the machine alone meanwhile)
	cd bench && go run .

microbench: consul postgres ## The hot paths' own benchmarks, six times each, summed up by benchstat (6 minutes)
	@mkdir -p bin
	go test -p 1 -run xxx -count 6 -bench 'Complete|Txn|AcquireRelease|Group' ./store ./lock/consul ./internal/batch > bin/microbench.txt
	ONEJOB_BENCH_ROWS=200000 go test -run xxx -count 6 -bench Claim -benchtime 200x ./store >> bin/microbench.txt
	cd bench && go tool benchstat ../bin/microbench.txt

figures: consul postgres rabbitmq ## Measure what tests and benchmarks say for the documents, into docs/why/reports/figures.txt (leave the machine alone meanwhile)
	@./scripts/figures.sh

pgo: consul postgres ## Profile a busy replica anew for the compiler: cmd/onejob/default.pgo (1 minute; leave the machine alone meanwhile)
	cd bench && go run -pgo=off . profile -tasks 400000 -out results/onejob.pprof
	cp bench/results/onejob.pprof cmd/onejob/default.pgo

# Without the profile of cmd/onejob, and for another system without optimisations, as nothing of that is run:
# vet compiles all that it looks at.
lint: export GOFLAGS := $(GOFLAGS) -pgo=off
lint: ## Format, terms, vet, staticcheck, tidy modules, shell syntax
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$unformatted" ] || { echo "not formatted with gofmt: $$unformatted" >&2; exit 1; }
	@tools/terms/check.sh
	go vet ./... && go vet ./testdata/embed/...
	GOOS=darwin go vet -gcflags='all=-N -l' . ./boottime ./lock/... ./onejobtest ./store ./tasks/... ./worker
	cd tools/lint && go build -o ../../bin/staticcheck honnef.co/go/tools/cmd/staticcheck
	bin/staticcheck ./...
	go mod tidy -diff
	cd bench && go vet ./... && ../bin/staticcheck ./... && go mod tidy -diff
	cd tools/page && go vet ./... && ../../bin/staticcheck ./... && go mod tidy -diff
	cd tools/consul/discover && go vet ./...
	cd tools/shape && go vet ./... && ../../bin/staticcheck ./... && go mod tidy -diff
	@for s in $$(git ls-files '*.sh' .ci/run); do bash -n "$$s"; done

chaos: consul postgres rabbitmq ## Break everything while tasks run, and let an observer check (DURATION=5m SEED= FAULTS= ...)
	go run ./chaos

compare: consul postgres ## The same run against two other ways (DURATION=6m SEED= FAULTS= ...; 40 minutes at most)
	DURATION=$${DURATION:-6m} SUBJECTS=$${SUBJECTS:-onejob,naive,apilock} go run ./chaos

mutants: consul postgres rabbitmq ## Break one protection at a time: each must be caught (2 hours; ONLY=fence,index)
	go run ./internal/mutants/run -only '$(ONLY)'

model: ## Check a model of the protocol with spin: which faults, and pairs of them, break which promise (QUICK=1: without pairs)
	@./scripts/model.sh

simulate: ## Replicas in a simulated world, repeatable from a seed, on all processors (DURATION=2m SEED= N= PROCS=; 5 minutes more the first time)
	go run ./simulate/run -duration $${DURATION:-2m} -seed $${SEED:-0} -n $${N:-0} -procs $${PROCS:-0}

simulate-test: ## The simulation's own tests: what excuses a rule ends, and a seed gives the same run twice (N=60 seeds)
	go run ./simulate/run -run 'TestExcusesEnd|TestSameSeedSameSchedule' -n $${N:-0}

partition-test: rabbitmq ## Clusters of RabbitMQ that are partitioned (2 minutes)
	TEST_PARTITIONS=1 go test -count=1 -timeout 10m -run TestPartitionedBrokers -v ./lock/rabbitmq

ha-test: consul postgres ## Patroni on Consul on three hosts (network namespaces, so root): failovers under an observer (5 to 10 minutes; STANDBY=async FAULTS= REPORT= KEEP=)
	@./scripts/ha-test.sh

suite-test: consul ## Tests with the Postgres, RabbitMQ and pgbouncer of another Debian, by chroot, so root (25 minutes; SUITE=bullseye or forky, PACKAGES='./store ./worker ./lock/rabbitmq')
	@./scripts/suite-test.sh $${SUITE:-bullseye} $${PACKAGES:-./store ./worker ./lock/rabbitmq}

cgroup-test: ## Test the limits of commands on a kernel that has all controllers of cgroup v2, User Mode Linux (2 minutes)
	@./scripts/cgroup-test.sh

compose-test: ## Bring up docker-compose.yml, kill a container, look whether anything is lost
	@./scripts/compose-test.sh

alerts-test: ## Check the alerts for Prometheus with promtool
	@./scripts/alerts-test.sh

page-test: consul postgres chromium ## Drive the web page in a headless Chromium, and make the pictures in docs/images (1 minute)
	go build -ldflags "-X onejob/internal/cli.release=dev" -o bin/onejob-page ./cmd/onejob
	cd tools/page && TEST_ONEJOB=$(CURDIR)/bin/onejob-page ONEJOB_CHROMIUM_BIN=$$(../../scripts/chromium.sh) go test -count=1 -v ./...

consul: ## Find or build the Consul server (2 to 5 minutes, once); its path is the last line
	@./scripts/consul.sh

postgres: ## Find or install the Postgres server; its folder is the last line
	@./scripts/postgres.sh

rabbitmq: ## Find or install the RabbitMQ server; its path is the last line
	@./scripts/rabbitmq.sh

chromium: ## Find or install a Chromium for page-test; its path is the last line
	@./scripts/chromium.sh

clean: ## Remove what was built here (the Consul server stays in the cache)
	rm -rf bin
