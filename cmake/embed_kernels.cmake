# The texts of kernels that are compiled when they are needed become part of the library, as strings in one C file.
# src/jit/source.c finds them there.

set(embedded_patterns src/cuda/kernels/*.cu src/cuda/kernels/*.cuh src/metal/kernels/*.metal src/metal/kernels/*.msl
                      src/metal/abi.h src/shared/*.h)
file(GLOB embedded_files CONFIGURE_DEPENDS ${embedded_patterns})

# A list in a file, which is written when it changes only: a file that goes away rebuilds too, with any generator.
set(embedded_list ${PROJECT_BINARY_DIR}/src/jit/embedded.txt)
set(embedded_source ${PROJECT_BINARY_DIR}/src/jit/embedded.c)
list(JOIN embedded_files "\n" embedded_lines)
file(CONFIGURE OUTPUT ${embedded_list} CONTENT "${embedded_lines}\n" @ONLY)

add_custom_command(
    OUTPUT ${embedded_source}
    COMMAND ${CMAKE_COMMAND} -DLIST=${embedded_list} -DOUTPUT=${embedded_source} -P
            ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    DEPENDS ${embedded_list} ${embedded_files} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
    COMMENT "Building kernel texts in"
    VERBATIM)
target_sources(flashback_objects PRIVATE ${embedded_source})
