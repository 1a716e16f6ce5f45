/* Results to files: all in one .safetensors, or one .npy each in a folder. Every file appears whole or not at
 * all. Floor: cli. */
#ifndef CLI_OUTPUTS_H
#define CLI_OUTPUTS_H

#include "inputs.h"

/* Exits with CLI_USAGE if the path names neither. */
void outputs_check_path(const char *path);

/* Exits with CLI_OUTPUT if something could not be written. */
void outputs_write(const inputs *in, const job *j, const char *path);

#endif
