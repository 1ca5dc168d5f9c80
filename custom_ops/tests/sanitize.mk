# Tests of the kernels in C++, built with sanitizers; included by the Makefile at the top. They need neither Python nor XLA.
#
# One program for each sanitizer (UndefinedBehaviorSanitizer goes along with AddressSanitizer), run on each instruction set that
# the machine has. SANITIZE_ROUNDS and SANITIZE_SEED are the programs' arguments, see testing.cc.

SANITIZE_BUILD := custom_ops/build/sanitize
SANITIZE_ROUNDS ?= 25
SANITIZE_SEED ?= 1
SANITIZERS := address thread
SANITIZE_FLAGS_address := -fsanitize=address,undefined -fno-sanitize-recover=all
SANITIZE_FLAGS_thread := -fsanitize=thread
# Every instruction set that the CPU has (another is ignored, and the run repeats its best one). How work is divided, which is
# what ThreadSanitizer looks at, differs with tiles only.
SANITIZE_AMX := $(if $(filter -DPOPTRANSFORMER_BUILDS_AMX,$(CUSTOM_OPS_CXXFLAGS)),amx)
SANITIZE_RUNS_address := $(CUSTOM_OPS_ISAS) $(SANITIZE_AMX)
SANITIZE_RUNS_thread := $(lastword $(CUSTOM_OPS_ISAS)) $(SANITIZE_AMX)

SANITIZE_SOURCES := $(filter-out %_ffi.cc custom_ops/common/manifest.cc,$(CUSTOM_OPS_SOURCES)) $(CUSTOM_OPS_TEST_SOURCES)
SANITIZE_OBJECTS := $(patsubst custom_ops/%.cc,%.o,$(filter-out %_kernel.cc %_amx.cc,$(SANITIZE_SOURCES))) \
  $(foreach isa,$(CUSTOM_OPS_ISAS),$(patsubst custom_ops/%.cc,%.$(isa).o,$(filter %_kernel.cc,$(SANITIZE_SOURCES)))) \
  $(if $(SANITIZE_AMX),$(patsubst custom_ops/%.cc,%.o,$(filter %_amx.cc,$(SANITIZE_SOURCES))))

# Optimised lightly: a sanitizer's checks in unrolled vector code take a compiler minutes at -O3.
SANITIZE_CXXFLAGS := $(filter-out -O3 -fPIC -fvisibility=hidden,$(CUSTOM_OPS_CXXFLAGS)) -O1 -g1

define SANITIZE_RULES
$(SANITIZE_BUILD)/$(1)/kernel_tests: $(addprefix $(SANITIZE_BUILD)/$(1)/,$(SANITIZE_OBJECTS))
	@echo "linking $$@"
	$$(QUIET)$$(CXX) $(SANITIZE_FLAGS_$(1)) -pthread -o $$@ $$^ $$(LDFLAGS)

$(SANITIZE_BUILD)/$(1)/%_amx.o: SANITIZE_ISA_FLAGS := $$(CUSTOM_OPS_FLAGS_amx)
$(SANITIZE_BUILD)/$(1)/%.o: custom_ops/%.cc custom_ops/custom_ops.mk custom_ops/tests/sanitize.mk
	@mkdir -p $$(@D)
	@echo "compiling $$< with -fsanitize=$(1)"
	$$(QUIET)$$(CXX) $$(SANITIZE_CXXFLAGS) $$(SANITIZE_ISA_FLAGS) $(SANITIZE_FLAGS_$(1)) $$(CXXFLAGS) -c $$< -o $$@

$(foreach isa,$(CUSTOM_OPS_ISAS),$(call SANITIZE_ISA_RULE,$(1),$(isa)))
endef

define SANITIZE_ISA_RULE
$(SANITIZE_BUILD)/$(1)/%.$(2).o: SANITIZE_ISA_FLAGS := $$(CUSTOM_OPS_FLAGS_$(2)) -DPOPTRANSFORMER_ISA_NAMESPACE=$(2)
$(SANITIZE_BUILD)/$(1)/packed_linear/%.$(2).o: SANITIZE_ISA_FLAGS += $(if $(filter avx512,$(2)),-mavx512vnni)
$(SANITIZE_BUILD)/$(1)/%.$(2).o: custom_ops/%.cc custom_ops/custom_ops.mk custom_ops/tests/sanitize.mk
	@mkdir -p $$(@D)
	@echo "compiling $$< for $(2) with -fsanitize=$(1)"
	$$(QUIET)$$(CXX) $$(SANITIZE_CXXFLAGS) $$(SANITIZE_ISA_FLAGS) $(SANITIZE_FLAGS_$(1)) $$(CXXFLAGS) -c $$< -o $$@

endef
$(foreach sanitizer,$(SANITIZERS),$(eval $(call SANITIZE_RULES,$(sanitizer))))

.PHONY: sanitize
sanitize: $(foreach sanitizer,$(SANITIZERS),sanitize-$(sanitizer))

# More threads than most machines have cores. die_after_fork is for the test that forks; a suppression would hide what it looks for.
SANITIZE_ENVIRONMENT_address := ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
SANITIZE_ENVIRONMENT_thread := TSAN_OPTIONS=die_after_fork=0:second_deadlock_stack=1
define SANITIZE_RUN_RULE
.PHONY: sanitize-$(1)
sanitize-$(1): $(SANITIZE_BUILD)/$(1)/kernel_tests
	@for isa in $(SANITIZE_RUNS_$(1)); do \
	  POPTRANSFORMER_ISA=$$$$isa POPTRANSFORMER_NUM_THREADS=3 $(SANITIZE_ENVIRONMENT_$(1)) \
	    $$< $(SANITIZE_ROUNDS) $(SANITIZE_SEED) || exit 1; done
	@echo "✓ $(SANITIZE_FLAGS_$(1))"
endef
$(foreach sanitizer,$(SANITIZERS),$(eval $(call SANITIZE_RUN_RULE,$(sanitizer))))

-include $(foreach sanitizer,$(SANITIZERS),$(patsubst %.o,$(SANITIZE_BUILD)/$(sanitizer)/%.d,$(SANITIZE_OBJECTS)))
