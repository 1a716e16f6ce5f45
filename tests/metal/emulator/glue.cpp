/* From Metal text to a library: every kernel's parameters lose their attributes, which C++ does not have, and it gets
 * a function that fills them from a dispatch. The rest is the compiler's, with include/ in place of Apple's headers.
 * Next: schedule.cpp. */
#include "runtime.h"

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

extern "C" __attribute__((weak)) void *__tsan_create_fiber(unsigned flags);

struct emulator_function {
    emulator_entry *entry;
    std::string name;
    const void *image;
};

struct emulator_library {
    void *handle;
    std::mutex lock;
    std::map<std::string, emulator_function> functions;
};

namespace {

using text = std::string;

/* Past the bracket that closes the one at `open`; comments and strings do not hold brackets in parameters. */
size_t closing(const text &s, size_t open) {
    int depth = 0;
    for (size_t n = open; n < s.size(); n++) {
        depth += strchr("([{", s[n]) ? 1 : strchr(")]}", s[n]) ? -1 : 0;
        if (depth == 0)
            return n;
    }
    return text::npos;
}

/* "name(expression)" of an attribute as what emulator_invoke wants. */
text place_of(const text &attribute) {
    const size_t open = attribute.find('('), close = attribute.rfind(')');
    text name = attribute.substr(0, open);
    name.erase(0, name.find_first_not_of(" \t\n"));
    name.erase(name.find_last_not_of(" \t\n") + 1);
    return name == "buffer" ? attribute.substr(open + 1, close - open - 1) : "EMULATOR_AT_" + name;
}

/* Blanks the attributes of a kernel's parameters and returns where these come from, in order. */
text take_attributes(text *s, size_t open, size_t close) {
    text places;
    for (size_t n = open; (n = s->find("[[", n)) < close;) {
        const size_t end = s->find("]]", n);
        places += (places.empty() ? "" : ", ") + place_of(s->substr(n + 2, end - n - 2));
        for (; n < end + 2; n++)
            if ((*s)[n] != '\n')
                (*s)[n] = ' ';
    }
    return places;
}

text translate(text source) {
    text glue;
    for (size_t n = 0; (n = source.find("kernel void ", n)) != text::npos;) {
        const size_t open = source.find('(', n), close = open == text::npos ? open : closing(source, open);
        if (close == text::npos)
            break;
        const text name = source.substr(n + 12, open - n - 12), places = take_attributes(&source, open, close);
        glue += "extern \"C\" __attribute__((visibility(\"default\"))) void emulator_of_" + name +
                "(const emulator_call *call) { emulator_invoke(" + name + ", call, {" + places + "}); }\n";
        n = close;
    }
    return "#include <metal_stdlib>\n#line 1 \"text\"\n" + source + "\n#line 1 \"glue\"\n" + glue;
}

uint64_t hash_of(const text &s, uint64_t from) {
    for (char c : s)
        from = (from ^ (unsigned char)c) * 0x100000001b3u;
    return from;
}

text read_file(const text &path) {
    text all;
    if (FILE *f = fopen(path.c_str(), "rb")) {
        char piece[4096];
        for (size_t n; (n = fread(piece, 1, sizeof piece, f));)
            all.append(piece, n);
        fclose(f);
    }
    return all;
}

bool write_file(const text &path, const text &all) {
    FILE *f = fopen(path.c_str(), "wb");
    const bool good = f && fwrite(all.data(), 1, all.size(), f) == all.size();
    return f && fclose(f) == 0 && good;
}

text options_of(unsigned how) {
    text options = " -std=c++17 -O1 -march=native -w -fPIC -shared -fvisibility=hidden -ffp-contract=off "
                   "-fno-strict-aliasing -fno-exceptions -fno-rtti -isystem " EMULATOR_FOLDER "/include";
    if (how & EMULATOR_CHECKED)
        options += " -gline-tables-only -fsanitize-coverage=bb,trace-loads,trace-stores -DEMULATOR_IS_CHECKED";
    if (how & EMULATOR_RACES)
        options += " -gline-tables-only -fsanitize=thread";
    return options;
}

/* Where the library is kept; "" for nowhere. */
text cached_path(const text &source, unsigned how) {
    const char *folder = getenv("EMULATOR_CACHE");
    if (!folder || !*folder)
        return "";
    uint64_t hash = hash_of(options_of(how), 0xcbf29ce484222325u);
    hash = hash_of(read_file(EMULATOR_FOLDER "/include/metal_stdlib"), hash);
    hash = hash_of(read_file(EMULATOR_FOLDER "/runtime.h"), hash_of(source, hash));
    char name[64];
    snprintf(name, sizeof name, "/%016llx.so", (unsigned long long)hash);
    return folder + text(name);
}

/* Runs a command, whose words have no blanks, with its output in a file. ThreadSanitizer, where it comes by LD_PRELOAD,
 * is for this program and not for the compiler. */
bool run(const text &command, const text &output) {
    std::vector<text> words(1);
    for (char c : command)
        if (c == ' ')
            words.emplace_back();
        else
            words.back() += c;
    std::vector<char *> arguments, variables;
    for (text &w : words)
        arguments.push_back(w.data());
    arguments.push_back(nullptr);
    for (char **e = environ; *e; e++)
        if (strncmp(*e, "LD_PRELOAD=", 11) != 0)
            variables.push_back(*e);
    variables.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t child;
    int status = -1;
    if (posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), variables.data()) == 0)
        while (waitpid(child, &status, 0) < 0 && errno == EINTR)
            ;
    posix_spawn_file_actions_destroy(&actions);
    return status == 0;
}

/* Compiles to `path`; the messages. */
bool compile(const text &source, unsigned how, const text &folder, const text &path, text *log) {
    write_file(folder + "/kernel.cpp", source);
    const text command = text(EMULATOR_CXX) + options_of(how) + " " + folder + "/kernel.cpp -o " + path;
    const bool good = run(command, folder + "/log");
    *log = read_file(folder + "/log");
    return good;
}

emulator_library *open_library(const text &path, text *log) {
    void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    emulator_attach *attach = handle ? (emulator_attach *)dlsym(handle, "emulator_attach_runtime") : nullptr;
    if (!attach) {
        *log = dlerror();
        return nullptr;
    }
    attach(&emulator_the_runtime);
    emulator_library *library = new emulator_library;
    library->handle = handle;
    return library;
}

/* A folder for the time of a compilation. */
struct folder {
    char path[40] = "/tmp/flashback-emulator-XXXXXX";
    bool made = mkdtemp(path) != nullptr;
    ~folder() {
        for (const char *name : {"/kernel.cpp", "/log", "/kernel.so"})
            unlink((path + text(name)).c_str());
        rmdir(path);
    }
};

emulator_library *build(const text &source, unsigned how, text *log) {
    const text kept = cached_path(source, how);
    if (!kept.empty() && access(kept.c_str(), R_OK) == 0)
        return open_library(kept, log);
    folder f;
    const text path = f.path + text("/kernel.so");
    if (!f.made || !compile(source, how, f.path, path, log))
        return nullptr;
    if (!kept.empty()) { /* under another name first, so that nobody reads a part */
        const text part = kept + "." + std::to_string(getpid());
        if (write_file(part, read_file(path)) && rename(part.c_str(), kept.c_str()) == 0)
            return open_library(kept, log); /* which stays, for those who look up lines in it */
        unlink(part.c_str());
    }
    return open_library(path, log);
}

/* What the environment asks for besides: a program under ThreadSanitizer has kernels that it sees. */
unsigned environment() {
    const char *checked = getenv("EMULATOR_CHECKED");
    return (checked && *checked ? EMULATOR_CHECKED : 0) | (__tsan_create_fiber ? EMULATOR_RACES : 0);
}

text numbers(const unsigned long *of) {
    text all;
    for (int n = 0; n < EMULATOR_BUFFERS; n++)
        all += (n ? "," : "") + std::to_string(of[n]);
    return "[" + all + "]";
}

/* A line of JSON for each dispatch, in one write. */
void write_counts(const char *path, const text &name, const emulator_dispatch *d, const emulator_counts &c) {
    const text line = "{\"kernel\":\"" + name + "\",\"threads\":" + std::to_string(d->threads) +
                      ",\"threadgroup_bytes\":" + std::to_string(d->threadgroup_bytes) +
                      ",\"threadgroups\":" + std::to_string(c.threadgroups) +
                      ",\"products\":" + std::to_string(c.products) + ",\"barriers\":" + std::to_string(c.barriers) +
                      ",\"shared_loads\":" + std::to_string(c.shared_loads) +
                      ",\"shared_stores\":" + std::to_string(c.shared_stores) + ",\"loads\":" + numbers(c.loads) +
                      ",\"stores\":" + numbers(c.stores) + "}\n";
    const int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (file < 0 || write(file, line.data(), line.size()) != (ssize_t)line.size())
        perror(path);
    close(file);
}

} // namespace

extern "C" {

emulator_library *emulator_compile(const char *source, unsigned how, char **log) {
    text messages;
    how |= environment();
    emulator_library *library = build(translate(source), how, &messages);
    if (log)
        *log = library ? nullptr : strdup(messages.c_str());
    return library;
}

void emulator_release(emulator_library *library) {
    if (library)
        dlclose(library->handle);
    delete library;
}

emulator_function *emulator_find(emulator_library *library, const char *name) {
    const std::lock_guard<std::mutex> guard(library->lock);
    const auto found = library->functions.find(name);
    if (found != library->functions.end())
        return &found->second;
    emulator_entry *entry = (emulator_entry *)dlsym(library->handle, ("emulator_of_" + text(name)).c_str());
    if (!entry)
        return nullptr;
    Dl_info info = {};
    dladdr((void *)entry, &info);
    return &(library->functions[name] = {entry, name, info.dli_fbase});
}

bool emulator_run(const emulator_function *f, const emulator_dispatch *dispatch, emulator_counts *counts, char *message,
                  size_t size) {
    emulator_counts here = {};
    const bool good = emulator_start(f->entry, f->name.c_str(), f->image, dispatch, &here, message, size);
    if (counts) {
        const unsigned long *from = (const unsigned long *)&here;
        for (size_t n = 0; n < sizeof here / sizeof *from; n++)
            ((unsigned long *)counts)[n] += from[n];
    }
    if (const char *path = getenv("EMULATOR_COUNTS"))
        write_counts(path, f->name, dispatch, here);
    return good;
}
}
