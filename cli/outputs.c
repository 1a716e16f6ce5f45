/* See outputs.h. Floor: cli. */
#include "outputs.h"
#include "cli.h"
#include "flashback.h"
#include "npy.h"
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

static bool is_folder(const char *path) {
    struct stat info;
    return file_ends(path, "/") || (!stat(path, &info) && S_ISDIR(info.st_mode));
}

void outputs_check_path(const char *path) {
    if (!is_folder(path) && !file_ends(path, ".safetensors"))
        cli_fail(CLI_USAGE,
                 "--output is '%s'; expected a name ending in .safetensors, or a folder (ending in /)", path);
}

/* The output in the shape that belongs to the inputs: as many dimensions, in their order. */
static tensor output_of(const inputs *in, const job *j, fbh_id id) {
    const fbh_tensor *from = &j->problem.t[id];
    const bool packed = j->problem.cu_q != NULL, rows_first = packed || in->options.layout == FBH_BLHD;
    const int64_t batch = from->batch, heads = from->heads, cols = from->cols;
    const int64_t rows =
        packed && from->cu ? (from->cu == j->problem.cu_q ? j->problem.desc.total_q : j->problem.desc.total_k)
                           : from->rows;
    tensor t = {.name = from->name,
                .type = (tensor_type)from->type,
                .dims = in->t[FBH_Q].dims,
                .data = from->buffer->data + from->offset};
    int64_t all[4] = {batch, rows_first ? rows : heads, rows_first ? heads : rows, cols};
    if (id == FBH_LSE) {
        t.dims = t.dims - 1;
        memcpy(all, (int64_t[4]){1, packed ? 1 : batch, heads, rows}, sizeof all);
    } else if (id == FBH_DSINKS) {
        t.dims = 1;
        memcpy(all, (int64_t[4]){1, 1, 1, heads}, sizeof all);
    } else if (id == FBH_DBIAS) {
        t.dims = in->t[FBH_BIAS].dims;
        memcpy(all, (int64_t[4]){batch, heads, rows, cols}, sizeof all);
    }
    memcpy(t.shape, all + 4 - t.dims, (size_t)t.dims * sizeof *all);
    tensor_measure(&t);
    return t;
}

static void begin(draft *d, const char *path) {
    complaint why;
    if (!file_begin(d, path, &why))
        cli_fail(CLI_OUTPUT, "%s", why.text);
}

static void finish(draft *d, bool written) {
    complaint why;
    if (written && file_commit(d, &why))
        return;
    if (!written) {
        complain(&why, "%s: cannot be written: %s", d->path, strerror(errno));
        file_abandon(d);
    }
    cli_fail(CLI_OUTPUT, "%s", why.text);
}

static void write_safetensors(const tensor *tensors, size_t count, const job *j, const char *path) {
    const word_text route = job_explained(j, "route");
    const char *const metadata[] = {"flashback", fb_version(), "route", route.text, NULL};
    draft d;
    begin(&d, path);
    finish(&d, safetensors_write(d.stream, tensors, count, metadata));
}

static void write_npy(const tensor *t, const char *folder) {
    char path[4096];
    draft d;
    snprintf(path, sizeof path, "%s%s%s.npy", folder, file_ends(folder, "/") ? "" : "/", t->name);
    if (t->type == TENSOR_BF16)
        cli_fail(CLI_OUTPUT, "%s: npy has no bf16; write to a .safetensors file, or use --dtype f32", path);
    begin(&d, path);
    finish(&d, npy_write(d.stream, t));
}

void outputs_write(const inputs *in, const job *j, const char *path) {
    tensor tensors[FBH_COUNT];
    size_t count = 0;
    for (int id = FBH_OUT; id < FBH_WORKSPACE; id++)
        if (j->problem.t[id].buffer)
            tensors[count++] = output_of(in, j, (fbh_id)id);
    if (!is_folder(path)) {
        write_safetensors(tensors, count, j, path);
        return;
    }
    if (mkdir(path, 0777) && errno != EEXIST)
        cli_fail(CLI_OUTPUT, "%s: the folder cannot be made: %s", path, strerror(errno));
    for (size_t i = 0; i < count; i++)
        write_npy(&tensors[i], path);
}
