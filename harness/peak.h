/* Ceilings of this machine, measured by own loops: multiply-adds a second and bytes a second. A time or a
 * rate of the library means something only beside them. Next: peak.c (threads and time), peak_loops.c,
 * peak_bf16.c, peak_read.c (what they run). Floor: harness. */
#ifndef HARNESS_PEAK_H
#define HARNESS_PEAK_H

/* What multiplies: the widest fused multiply-adds in f32 and f64, products of bf16 pairs in vectors, and in
 * the tiles of AMX. */
typedef enum fbh_peak_type { FBH_PEAK_F32, FBH_PEAK_F64, FBH_PEAK_AVX512BF16, FBH_PEAK_AMX } fbh_peak_type;

/* GFLOP/s of `threads` threads that do nothing but independent multiply-adds on registers (2 operations each)
 * for about `seconds` each. 0 if the machine has no such instructions, or no thread could start. */
double fbh_peak_flops(fbh_peak_type type, int threads, double seconds);

/* What the loops of F32 and F64 use: "avx512f", "avx2+fma" or "portable". */
const char *fbh_peak_isa(void);

/* GB/s of a[i] = b[i] + c * d[i] over three arrays of `megabytes` MB a thread: three streams counted, 10^9
 * bytes. 0 if memory or threads ran out. */
double fbh_peak_bandwidth(int threads, double seconds, int megabytes);

/* Memory to read from, in huge pages where there are any: twice the last level of cache, and 64 MB a thread,
 * at least, but no more than a quarter of all. NULL if it ran out. */
typedef struct fbh_reader fbh_reader;
fbh_reader *fbh_reader_open(int threads);
void fbh_reader_close(fbh_reader *r); /* NULL is fine */

/* GB/s (10^9 bytes) of its threads that do nothing but load, each from its own part, for about `seconds`. The
 * next call goes on where this one ended, so that caches do not help. 0 if no thread could start. */
double fbh_reader_run(fbh_reader *r, double seconds);

#endif
