# Every choice a builder has, and what follows from it for all targets.

option(FLASHBACK_OPENMP "Use OpenMP; without it every call runs on one thread" ON)
option(FLASHBACK_CLI "Build the command line tool (needs jansson)" ON)
option(FLASHBACK_TRAIN "Build flashback-train, a language model that learns (needs jansson and a BLAS)" ${PROJECT_IS_TOP_LEVEL})
option(FLASHBACK_TESTS "Build the tests, and the command line tool for them (needs cmocka)" ${PROJECT_IS_TOP_LEVEL})
option(FLASHBACK_PYTHON "Install the shared library into Python's package, for wheels" OFF)
option(FLASHBACK_WERROR "Treat warnings as errors" OFF)
option(FLASHBACK_FUZZ "Build tests/fuzz against libFuzzer (needs clang)" OFF)
set(FLASHBACK_SANITIZE "" CACHE STRING "Sanitizers for everything, e.g. address,undefined or thread")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, RelWithDebInfo, Debug or MinSizeRel" FORCE)
endif()

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)

if(FLASHBACK_FUZZ)
    if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
        message(FATAL_ERROR "FLASHBACK_FUZZ needs clang, for libFuzzer; the compiler is ${CMAKE_C_COMPILER_ID}. "
                            "Configure with CC=clang.")
    endif()
    set(FLASHBACK_SANITIZE "address,undefined")
    add_compile_options(-fsanitize=fuzzer-no-link)
endif()

if(FLASHBACK_SANITIZE)
    add_compile_options(-fsanitize=${FLASHBACK_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    add_link_options(-fsanitize=${FLASHBACK_SANITIZE})
endif()
