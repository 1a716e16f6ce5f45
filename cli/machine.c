/* See machine.h. Floor: cli. */
#include "machine.h"
#include "flashback.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>

static word_text word(const char *from, size_t length) {
    word_text w;
    while (length && from[length - 1] == ' ')
        length--;
    snprintf(w.text, sizeof w.text, "%.*s", (int)length, from);
    return w;
}

/* Behind "key: " of the first such line; NULL if there is none. */
static const char *value_of(const char *text, const char *key) {
    const size_t length = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (!strncmp(line, key, length) && line[length] == ':')
            return line + length + 1 + strspn(line + length + 1, " ");
    }
    return NULL;
}

word_text word_after(const char *text, const char *key) {
    const char *value = value_of(text, key);
    return value ? word(value, strcspn(value, ",;(\n")) : word("?", 1);
}

word_text word_behind(const char *text, const char *key, const char *lead) {
    const char *value = value_of(text, key);
    const char *found = value ? strstr(value, lead) : NULL;
    if (!found || found > value + strcspn(value, "\n"))
        return word("?", 1);
    found += strlen(lead);
    return word(found, strcspn(found, " ,;()\n"));
}

/* Some architectures name no model there; the kernel's name of the machine has to do. */
word_text machine_cpu(void) {
    char line[256];
    struct utsname names;
    FILE *file = fopen("/proc/cpuinfo", "r");
    word_text found = uname(&names) ? word("?", 1) : word(names.machine, strlen(names.machine));
    while (file && fgets(line, sizeof line, file)) {
        const char *value = strchr(line, ':');
        if (value && !strncmp(line, "model name", 10)) {
            value += 1 + strspn(value + 1, " ");
            found = word(value, strcspn(value, "\n"));
            break;
        }
    }
    if (file)
        fclose(file);
    return found;
}

word_text machine_compiler(void) {
#ifdef __clang__
    static const char name[] = "clang " __clang_version__;
#else
    static const char name[] = "gcc " __VERSION__;
#endif
    return word(name, strcspn(name, "("));
}

word_text machine_date(void) {
    word_text w;
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(w.text, sizeof w.text, "%Y-%m-%d", &utc);
    return w;
}

int machine_threads(void) {
    static char text[16384];
    fb_info(text, sizeof text);
    const int threads = atoi(word_after(text, "cpu threads").text);
    return threads > 0 ? threads : 1;
}

machine_gpu machine_find_gpu(int index) {
    static char text[16384];
    char key[32];
    snprintf(key, sizeof key, "cuda device %d", index);
    fb_info(text, sizeof text);
    return (machine_gpu){.name = word_after(text, key),
                         .capability = word_behind(text, key, "compute capability "),
                         .driver = word_after(text, "cuda driver"),
                         .nvrtc = word_behind(text, "cuda compiler", "nvrtc "),
                         .products = word_after(text, "cuda products")};
}

word_text machine_find_metal(int index) {
    static char text[16384];
    char key[32];
    snprintf(key, sizeof key, "metal device %d", index);
    fb_info(text, sizeof text);
    return word_after(text, key);
}
