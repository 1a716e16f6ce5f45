# CPU kernels: one text, src/cpu/isa/kernel.inc, compiled once per instruction set by the file named after it.
# Only these files get instruction set flags, so that everything else runs on any machine of the architecture;
# src/cpu/rows.c chooses among them at run time. They use GNU C's vector extensions, hence gnu11.

include(CheckCCompilerFlag)

file(GLOB kernel_sources CONFIGURE_DEPENDS src/cpu/isa/*.c)

set(kernel_flags -std=gnu11 -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math -Wno-pedantic -Wno-psabi)
if(FLASHBACK_SANITIZE)
    list(TRANSFORM kernel_flags REPLACE "^-O3$" "-O2") # a sanitizer's checks make -O3 take minutes
endif()

set(scalar_flags -fno-tree-vectorize)
if(CMAKE_C_COMPILER_ID MATCHES "Clang")
    set(scalar_flags -fno-vectorize -fno-slp-vectorize)
endif()
set(avx2_flags -mavx2 -mfma -mf16c)
set(avx512_flags -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
set(avx512bf16_flags ${avx512_flags} -mavx512bf16)
set(amx_flags ${avx512bf16_flags} -mamx-tile -mamx-bf16)
set(amx_model_flags ${avx512bf16_flags})

set(bfdot_flags -march=armv8.2-a+bf16)

# The sets that this compiler builds for this processor; rows.c asks for FB_HAVE_*.
set(machine_isas "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
    set(machine_isas avx2 avx512)
    target_compile_definitions(flashback_objects PRIVATE FB_HAVE_AVX2 FB_HAVE_AVX512)
    check_c_compiler_flag("-mavx512bf16 -mamx-tile -mamx-bf16" FLASHBACK_C_AVX512BF16)
    if(FLASHBACK_C_AVX512BF16)
        list(APPEND machine_isas avx512bf16 amx amx_model)
        target_compile_definitions(flashback_objects PRIVATE FB_HAVE_AVX512BF16)
    endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    check_c_compiler_flag("${bfdot_flags}" FLASHBACK_C_BFDOT)
    if(FLASHBACK_C_BFDOT)
        list(APPEND machine_isas bfdot)
        target_compile_definitions(flashback_objects PRIVATE FB_HAVE_BFDOT)
    endif()
endif()

foreach(source IN LISTS kernel_sources)
    get_filename_component(isa ${source} NAME_WE)
    if(isa MATCHES "^(avx|amx|bfdot)" AND NOT isa IN_LIST machine_isas)
        set_source_files_properties(${source} PROPERTIES HEADER_FILE_ONLY ON)
    else()
        set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${kernel_flags};${${isa}_flags}")
    endif()
endforeach()
