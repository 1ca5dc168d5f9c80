# Custom ops for the CPU; included by the Makefile at the top.
#
# custom_ops/OP/*.cc makes one library, no list to edit (custom_ops/tests/ makes programs of its own, see sanitize.mk there). A file named *_kernel.cc is compiled once per instruction set (see
# custom_ops/common/simd.h), any other once. The interpreter is asked for XLA's headers only when something is to be compiled.

CXX ?= g++
RUN_PYTHON ?= $(or $(PYTHON),python3)

# Set to nothing (make QUIET=) to see the compiler's command lines.
QUIET ?= @

CUSTOM_OPS_BUILD := custom_ops/build
CUSTOM_OPS_LIBRARY := $(CUSTOM_OPS_BUILD)/libcustom_ops_cpu.so

# -isystem keeps other people's warnings out, -MD (not -MMD) still lists their headers, so a new jaxlib rebuilds.
CUSTOM_OPS_CXXFLAGS := -O3 -std=c++17 -fPIC -pthread -fvisibility=hidden -Wall -Wextra -MD -MP -Icustom_ops

CUSTOM_OPS_ISAS := portable
ifneq ($(filter x86_64 amd64,$(shell uname -m)),)
CUSTOM_OPS_ISAS += avx2 avx512
endif
CUSTOM_OPS_FLAGS_portable :=
CUSTOM_OPS_FLAGS_avx2 := -mavx2 -mfma -mf16c
CUSTOM_OPS_FLAGS_avx512 := $(CUSTOM_OPS_FLAGS_avx2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
# GCC 12 takes the deliberately undefined operands inside its own AVX-512 intrinsics for mistakes (GCC bug 105593).
CUSTOM_OPS_FLAGS_avx512 += -Wno-uninitialized -Wno-maybe-uninitialized -Wno-unknown-warning-option

# This one's AVX-512 build is run only where there is VNNI as well.
$(CUSTOM_OPS_BUILD)/packed_linear/%.avx512.o: CUSTOM_OPS_FLAGS_avx512 += -mavx512vnni

CUSTOM_OPS_TEST_SOURCES := $(wildcard custom_ops/tests/*.cc)
CUSTOM_OPS_SOURCES := $(filter-out $(CUSTOM_OPS_TEST_SOURCES),$(wildcard custom_ops/*/*.cc))
CUSTOM_OPS_KERNELS := $(filter %_kernel.cc,$(CUSTOM_OPS_SOURCES))
CUSTOM_OPS_OBJECTS := \
  $(patsubst custom_ops/%.cc,$(CUSTOM_OPS_BUILD)/%.o,$(filter-out %_kernel.cc %_amx.cc,$(CUSTOM_OPS_SOURCES))) \
  $(foreach isa,$(CUSTOM_OPS_ISAS),$(patsubst custom_ops/%.cc,$(CUSTOM_OPS_BUILD)/%.$(isa).o,$(CUSTOM_OPS_KERNELS)))

# *_amx.cc: for CPUs with tile units (which have AVX512-BF16 too), where the compiler knows them.
CUSTOM_OPS_FLAGS_amx := $(CUSTOM_OPS_FLAGS_avx512) -mavx512bf16 -mamx-tile -mamx-bf16 -DPOPTRANSFORMER_ISA_NAMESPACE=amx
ifneq ($(filter avx512,$(CUSTOM_OPS_ISAS)),)
ifeq ($(shell $(CXX) -mamx-tile -mamx-bf16 -x c++ -fsyntax-only /dev/null 2>/dev/null && echo yes),yes)
CUSTOM_OPS_CXXFLAGS += -DPOPTRANSFORMER_BUILDS_AMX
CUSTOM_OPS_OBJECTS += $(patsubst custom_ops/%.cc,$(CUSTOM_OPS_BUILD)/%.o,$(filter %_amx.cc,$(CUSTOM_OPS_SOURCES)))
$(CUSTOM_OPS_BUILD)/%_amx.o: CUSTOM_OPS_CXXFLAGS += $(CUSTOM_OPS_FLAGS_amx)
endif
endif

# Three lines: the interpreter, its XLA headers, the jaxlib they belong to. Written anew when one of them is no longer so.
CUSTOM_OPS_HEADERS := $(CUSTOM_OPS_BUILD)/xla_headers
define CUSTOM_OPS_ASK_PYTHON
import glob, os, jax.ffi
folder = jax.ffi.include_dir()
names = sorted(map(os.path.basename, glob.glob(os.path.join(folder, "..", "..", "jaxlib-*.dist-info"))))
print("$(RUN_PYTHON)", folder, " ".join(names), sep="\n")
endef
export CUSTOM_OPS_ASK_PYTHON
ifneq ($(wildcard $(CUSTOM_OPS_HEADERS)),)
CUSTOM_OPS_INCLUDE := $(shell sed -n 2p $(CUSTOM_OPS_HEADERS))
CUSTOM_OPS_JAXLIB_NOW := $(sort $(notdir $(wildcard $(CUSTOM_OPS_INCLUDE)/../../jaxlib-*.dist-info)))
ifneq ($(strip $(shell cat $(CUSTOM_OPS_HEADERS))),$(strip $(RUN_PYTHON) $(CUSTOM_OPS_INCLUDE) $(CUSTOM_OPS_JAXLIB_NOW)))
$(CUSTOM_OPS_HEADERS): custom-ops-always
else ifeq ($(wildcard $(CUSTOM_OPS_INCLUDE)/xla/ffi/api/ffi.h),)
$(CUSTOM_OPS_HEADERS): custom-ops-always
endif
endif

.PHONY: custom-ops clean-custom-ops custom-ops-always

custom-ops: $(CUSTOM_OPS_LIBRARY)

$(CUSTOM_OPS_HEADERS):
	@mkdir -p $(@D)
	@$(RUN_PYTHON) -c "$$CUSTOM_OPS_ASK_PYTHON" > $@.new || \
	  { rm -f $@.new; echo "custom ops need XLA's headers: install jax for $(RUN_PYTHON), or set PYTHON=" >&2; exit 1; }
	@mv $@.new $@

# Compile and link to a new name first: an interrupted build leaves no half file, a running process keeps its old library.
$(CUSTOM_OPS_LIBRARY): $(CUSTOM_OPS_OBJECTS)
	@echo "linking $@"
	$(QUIET)$(CXX) -shared -pthread -Wl,-z,defs -o $@.new $(CUSTOM_OPS_OBJECTS) $(LDFLAGS)
	@mv $@.new $@

CUSTOM_OPS_COMPILE = $(CXX) $(CUSTOM_OPS_CXXFLAGS) -isystem "$$(sed -n 2p $(CUSTOM_OPS_HEADERS))" $(CXXFLAGS)

$(CUSTOM_OPS_BUILD)/%.o: custom_ops/%.cc $(CUSTOM_OPS_HEADERS) custom_ops/custom_ops.mk
	@mkdir -p $(@D)
	@echo "compiling $<"
	$(QUIET)$(CUSTOM_OPS_COMPILE) -c $< -o $@

define CUSTOM_OPS_ISA_RULE
$(CUSTOM_OPS_BUILD)/%.$(1).o: custom_ops/%.cc $(CUSTOM_OPS_HEADERS) custom_ops/custom_ops.mk
	@mkdir -p $$(@D)
	@echo "compiling $$< for $(1)"
	$$(QUIET)$$(CUSTOM_OPS_COMPILE) $$(CUSTOM_OPS_FLAGS_$(1)) -DPOPTRANSFORMER_ISA_NAMESPACE=$(1) -c $$< -o $$@
endef
$(foreach isa,$(CUSTOM_OPS_ISAS),$(eval $(call CUSTOM_OPS_ISA_RULE,$(isa))))

clean-custom-ops:
	rm -rf $(CUSTOM_OPS_BUILD)

-include $(CUSTOM_OPS_OBJECTS:.o=.d)
