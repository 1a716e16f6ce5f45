/* Ceilings of this machine, measured by own loops: fused multiply-adds a second and bytes a second. A time or
 * a rate of the library means something only beside them. Floor: harness. */
#ifndef HARNESS_PEAK_H
#define HARNESS_PEAK_H

typedef enum fbh_peak_type { FBH_PEAK_F32, FBH_PEAK_F64 } fbh_peak_type;

/* GFLOP/s of `threads` threads that do nothing but independent fused multiply-adds on registers (2 operations
 * each) for about `seconds` each. The widest instruction set of the machine is used. 0 if no thread could
 * start. */
double fbh_peak_flops(fbh_peak_type type, int threads, double seconds);

/* Its name: "avx512f", "avx2+fma" or "portable". */
const char *fbh_peak_isa(void);

/* GB/s of a[i] = b[i] + c * d[i] over three arrays of `megabytes` MB a thread: three streams counted, 10^9
 * bytes. 0 if memory or threads ran out. */
double fbh_peak_bandwidth(int threads, double seconds, int megabytes);

#endif
