# What a person does with a clone of Larder. `make help` lists it; each target says what it did.

PREFIX  ?= /usr/local
DESTDIR ?=
# mount(8) looks for helpers in /sbin only.
SBINDIR ?= $(if $(shell test -L /sbin && echo merged),/usr/sbin,/sbin)
# The demonstration: image, mount point, and the Cargo profile it is built with.
IMAGE   ?= demo.img
MNT     ?= mnt
PROFILE ?= release

CARGO   ?= cargo
TARGET  := $(or $(CARGO_TARGET_DIR),target)
LARDER  := $(TARGET)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))/larder

.PHONY: help build run stop test posix bench torture fill fuzz lint install uninstall clean

help:
	@echo 'make run       build, make $(IMAGE) if there is none, mount it on ./$(MNT), show what it does'
	@echo 'make stop      unmount ./$(MNT) and check $(IMAGE)'
	@echo 'make test      every test; installs what they need when root'
	@echo 'make posix     pjdfstest and fsx on a mount, beside the kernel (FSX_OPERATIONS, default 1000000)'
	@echo 'make torture   crash states until STATES were seen (20000) or TIME seconds are over (3600)'
	@echo 'make fill      fill, empty and refill an image from 16 threads for FILL_SECONDS (120)'
	@echo 'make fuzz      hostile bytes and images, FUZZ_SECONDS (600) for each target (FUZZ: all); needs nightly Rust'
	@echo 'make bench     Larder and the kernel side by side, into docs/BENCHMARKS.md'
	@echo 'make lint      format, clippy, documentation, licences, tidiness'
	@echo 'make install   binary, mount helpers, man pages, completions (PREFIX=$(PREFIX), DESTDIR);'
	@echo '               with WITH_MKFS_BTRFS=1 also mkfs.btrfs, with WITH_BTRFS=1 also btrfs: they shadow'
	@echo '               those of btrfs-progs'
	@echo 'make clean     what was built; not $(IMAGE)'

build:
	@scripts/deps.sh build
	$(CARGO) build --profile $(PROFILE) -p larder-cli

run:
	@scripts/deps.sh run
	$(CARGO) build --profile $(PROFILE) -p larder-cli
	@scripts/demo.sh start $(LARDER) $(IMAGE) $(MNT)

stop:
	@scripts/demo.sh stop $(LARDER) $(IMAGE) $(MNT)

test:
	@scripts/test.sh

FSX_OPERATIONS ?= 1000000
posix: build
	@scripts/posix.sh $(LARDER) $(FSX_OPERATIONS)

bench:
	@scripts/deps.sh bench
	$(CARGO) build --release -p larder-cli -p larder-bench
	$(TARGET)/release/larder-bench $(ARGS)

FILL_SECONDS ?= 120
fill:
	@scripts/deps.sh test
	$(CARGO) run --release -p larder-simtest --bin fill -- --seconds $(FILL_SECONDS) $(ARGS)

STATES  ?= 20000
TIME    ?= 3600
torture:
	@scripts/deps.sh test
	$(CARGO) run --release -p larder-simtest --bin torture -- \
	    --states $(STATES) --seconds $(TIME) --kernel-share 0.06 $(ARGS)

FUZZ_SECONDS ?= 600
fuzz:
	@scripts/fuzz.sh $(FUZZ_SECONDS) $(FUZZ)

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps
	@scripts/deny.sh
	$(CARGO) run -q -p xtask -- tidy

BIN   = $(DESTDIR)$(PREFIX)/bin
SBIN  = $(DESTDIR)$(SBINDIR)
SHARE = $(DESTDIR)$(PREFIX)/share

# `make build` first, where root has no Rust toolchain.
install:
	@test -x $(LARDER) || $(MAKE) build
	@scripts/no-faults.sh $(LARDER)
	install -d $(BIN) $(SBIN) $(SHARE)/man/man1 $(SHARE)/man/man8 \
	    $(SHARE)/bash-completion/completions \
	    $(SHARE)/zsh/site-functions $(SHARE)/fish/vendor_completions.d
	install -m 755 $(LARDER) $(BIN)/larder
	ln -sf $(PREFIX)/bin/larder $(SBIN)/mount.fuse.larder
	ln -sf $(PREFIX)/bin/larder $(SBIN)/umount.fuse.larder
ifeq ($(WITH_MKFS_BTRFS),1)
	ln -sf larder $(BIN)/mkfs.btrfs
endif
ifeq ($(WITH_BTRFS),1)
	ln -sf larder $(BIN)/btrfs
endif
	rm -rf $(TARGET)/assets
	$(LARDER) assets $(TARGET)/assets
	install -m 644 $(TARGET)/assets/man/*.1 $(SHARE)/man/man1
	install -m 644 docs/man/larder.8 $(SHARE)/man/man8/larder.8
	install -m 644 $(TARGET)/assets/completions/larder.bash $(SHARE)/bash-completion/completions/larder
	install -m 644 $(TARGET)/assets/completions/_larder $(SHARE)/zsh/site-functions/_larder
	install -m 644 $(TARGET)/assets/completions/larder.fish $(SHARE)/fish/vendor_completions.d/larder.fish

uninstall:
	@if [ "$$(readlink $(BIN)/mkfs.btrfs)" = larder ]; then rm -f $(BIN)/mkfs.btrfs; fi
	@if [ "$$(readlink $(BIN)/btrfs)" = larder ]; then rm -f $(BIN)/btrfs; fi
	rm -f $(BIN)/larder $(SBIN)/mount.fuse.larder $(SBIN)/umount.fuse.larder \
	    $(SHARE)/man/man1/larder.1 $(SHARE)/man/man1/larder-*.1 \
	    $(SHARE)/man/man8/larder.8 \
	    $(SHARE)/bash-completion/completions/larder $(SHARE)/zsh/site-functions/_larder \
	    $(SHARE)/fish/vendor_completions.d/larder.fish

clean:
	$(CARGO) clean
