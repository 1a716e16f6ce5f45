# The warnings that all code of the project compiles without, on gcc and clang.

function(flashback_warnings target)
    target_compile_options(
        ${target}
        PRIVATE -Wall
                -Wextra
                -Wpedantic
                -Wconversion
                -Wshadow
                -Wstrict-prototypes
                -Wmissing-prototypes
                -Wvla
                -Wundef
                -Wdouble-promotion
                $<$<BOOL:${FLASHBACK_WERROR}>:-Werror>)
endfunction()
