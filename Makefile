# Front door. The build itself is Meson's; everything here works on a fresh Debian 12 or 13.
#
#   make            build into build/
#   make demo       the main job on a directory pool, with a table of what happened
#   make check      build and run the everyday tests
#   make check-long the same with the slow suites in full
#   make bench      measures against QEMU and raw; writes docs/performance.md (over an hour; it can be interrupted)
#   make bench-quick  the same, every kind of row, in less than half an hour. BENCH_ARGS="--rows RE --rounds N --qsd TREE ..."
#   make install    PREFIX=/usr/local
#
# CC=clang, SANITIZE=address,undefined or SANITIZE=thread choose another build directory.

CC ?= gcc
SANITIZE ?= none
PREFIX ?= /usr/local
comma := ,
BUILD ?= build$(if $(filter clang,$(CC)),-clang)$(if $(filter-out none,$(SANITIZE)),-$(subst $(comma),-,$(SANITIZE)))
export PATH := $(PATH):/usr/sbin:/sbin

.PHONY: all deps build demo check check-long bench bench-quick bench-profile install format layers clean
all: build

deps:
	@tools/install-packages

$(BUILD)/build.ninja: | deps
	CC=$(CC) meson setup $(BUILD) --prefix=$(PREFIX) -Db_sanitize=$(SANITIZE) $(if $(filter-out none,$(SANITIZE)),-Db_lundef=false)

build: deps $(BUILD)/build.ninja
	@ninja -C $(BUILD)

demo: build
	@tools/demo $(BUILD)/src/cli/varve

check: build
	@tools/run-tests $(BUILD)

check-long: build
	@VARVE_LONG=1 tools/run-tests $(BUILD) --long

bench: build
	@bench/run $(BUILD)/src/cli/varve

bench-quick: build
	@bench/run $(BUILD)/src/cli/varve --quick

# instructions a request, by callgrind; LABEL names the column in the page
bench-profile: build
	@bench/profile.py $(BUILD)/src/cli/varve --label "$(or $(LABEL),now)"

install: build
	meson install -C $(BUILD)

format:
	git ls-files '*.c' '*.h' | xargs clang-format -i

layers:
	@tools/check-layers

clean:
	rm -rf build build-*
