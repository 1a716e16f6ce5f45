/* Vectors of one element: the text as plain C, for processors and checkers without anything better. Floor:
 * cpu. */
#include "prelude.h"

#define ISA scalar
#define GEMM_TILES(X) X(4, 2) X(4, 1)

#define T float
#define TI int32_t
#define BITS 32
#define VB 4
#include "kernel.inc"
#undef VB

#define T double
#define TI int64_t
#define BITS 64
#define VB 8
#include "kernel.inc"
