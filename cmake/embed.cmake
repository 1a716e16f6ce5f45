# Writes a C file with the text of each listed file as a string. A script: cmake -DLIST=file -DOUTPUT=file.c -P
# LIST holds one path a line. The table's type is in src/jit/source.h.

file(STRINGS ${LIST} paths)

set(strings "")
set(rows "")
set(names "")
foreach(path IN LISTS paths)
    get_filename_component(name ${path} NAME)
    if(name IN_LIST names)
        message(FATAL_ERROR "${path}: another file that is built in has the same name; #include finds files by name.")
    endif()
    list(APPEND names ${name})
    list(LENGTH names number)

    file(READ ${path} text)
    string(REPLACE "\\" "\\\\" text "${text}")
    string(REPLACE "\"" "\\\"" text "${text}")
    string(REPLACE "?" "\\?" text "${text}") # there are trigraphs in C11
    string(REPLACE "\r" "\\r" text "${text}")
    string(REPLACE "\n" "\\n\"\n\"" text "${text}")
    string(APPEND strings "static const char text_${number}[] =\n\"${text}\";\n\n")
    string(APPEND rows "    {\"${name}\", text_${number}, sizeof text_${number} - 1},\n")
endforeach()

file(WRITE ${OUTPUT}
"/* Made by cmake/embed.cmake from kernel files and the headers that they share with C. Floor: jit. */
#include \"jit/source.h\"

#pragma GCC diagnostic ignored \"-Woverlength-strings\" /* gcc and clang take any length */

${strings}const fb__jit_file fb__jit_files[] = {
${rows}    {NULL, NULL, 0},
};
")
