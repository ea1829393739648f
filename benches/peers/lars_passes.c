/* The passes over memory of momentum and of LARS whose parameters' sums are at hand, one thread, AVX-512: what the order of work allows.
 *
 *   gcc -O3 -march=skylake-avx512 -mprefer-vector-width=512 lars_passes.c -o lars_passes
 *   ./lars_passes $(jq -r '.[].shape | reduce .[] as $n (1; . * $n)' data/shapes/resnet50.json)
 *
 * Arguments are the tensors' element counts. Prints medians of 11 rounds in turn; the update's results mean nothing.
 */
#define _GNU_SOURCE
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

enum { CHUNK = 65536, ROUNDS = 11, AHEAD = 128, SUM_AHEAD = 1024, HUGE_PAGE = 2 << 20 };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static float *allocate(long numel) {
    char *base = mmap(0, 4 * numel + 2 * HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) exit(1);
    base = (char *)(((size_t)base + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    madvise(base, 4 * numel, MADV_HUGEPAGE);
    for (long i = 0; i < numel; i++) ((float *)base)[i] = 0.01f;
    return (float *)base;
}

/* v = mu v + g, p = p - lr v; the sum of p squared if it is asked for. */
static inline __attribute__((always_inline)) double update(float *p, const float *g, float *v, long n, float lr, int summed) {
    __m512 rate = _mm512_set1_ps(lr), mu = _mm512_set1_ps(0.9f);
    __m512d low = _mm512_setzero_pd(), high = low;
    for (long i = 0; i < n; i += 16) {
        _mm_prefetch((char *)(p + i + AHEAD), _MM_HINT_T0);
        _mm_prefetch((char *)(g + i + AHEAD), _MM_HINT_T0);
        _mm_prefetch((char *)(v + i + AHEAD), _MM_HINT_T0);
        __m512 new_v = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(v + i), mu), _mm512_loadu_ps(g + i));
        __m512 new_p = _mm512_sub_ps(_mm512_loadu_ps(p + i), _mm512_mul_ps(rate, new_v));
        _mm512_storeu_ps(v + i, new_v);
        _mm512_storeu_ps(p + i, new_p);
        if (summed) {
            __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(new_p)), b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(new_p, 1));
            low = _mm512_fmadd_pd(a, a, low);
            high = _mm512_fmadd_pd(b, b, high);
        }
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

static double square_sum(const float *g, long n) {
    __m512d sums[8], total = _mm512_setzero_pd();
    for (int k = 0; k < 8; k++) sums[k] = _mm512_setzero_pd();
    for (long i = 0; i < n; i += 64)
        for (int k = 0; k < 8; k++) {
            if (k % 2 == 0) _mm_prefetch((char *)(g + i + 8 * k + SUM_AHEAD), _MM_HINT_T0);
            __m512d x = _mm512_cvtps_pd(_mm256_loadu_ps(g + i + 8 * k));
            sums[k] = _mm512_fmadd_pd(x, x, sums[k]);
        }
    for (int k = 0; k < 8; k++) total = _mm512_add_pd(total, sums[k]);
    return _mm512_reduce_add_pd(total);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    long tensors = argc - 1, total = 0, *first = malloc((tensors + 1) * sizeof *first);
    if (tensors < 1) return fprintf(stderr, "expected element counts\n"), 2;
    /* Tensors are padded to whole steps of the loops above. */
    for (long t = 0; t < tensors; t++) first[t] = total, total += (atol(argv[t + 1]) + 63) / 64 * 64;
    first[tensors] = total;
    float *p = allocate(total), *g = allocate(total), *v = allocate(total);
    double seconds[3][ROUNDS];
    volatile double sink = 0;
    for (int round = 0; round < ROUNDS; round++)
        for (int pass = 0; pass < 3; pass++) {
            double start = now();
            for (long t = 0; t < tensors; t++) {
                long from = first[t], end = first[t + 1], numel = end - from;
                if (pass == 0) { sink += update(p + from, g + from, v + from, numel, 1e-6f, 0); continue; }
                double sum = 0;
                for (long c = from; c < end; c += CHUNK) sum += square_sum(g + c, end - c < CHUNK ? end - c : CHUNK);
                sink += sum;
                if (pass == 2) continue;
                float lr = sum < 0 ? 1 : 1e-6f;
                /* The chunks summed last come first: they may still be in the cache. */
                for (long c = from + (numel - 1) / CHUNK * CHUNK; c >= from; c -= CHUNK)
                    sink += update(p + c, g + c, v + c, end - c < CHUNK ? end - c : CHUNK, lr, 1);
            }
            seconds[pass][round] = now() - start;
        }
    const char *names[] = {"momentum", "LARS", "sums alone"};
    for (int pass = 0; pass < 3; pass++) {
        qsort(seconds[pass], ROUNDS, sizeof(double), ascending);
        double median = seconds[pass][ROUNDS / 2];
        printf("%-10s %6.2f ms, %.3f of momentum\n", names[pass], 1e3 * median, median / seconds[0][ROUNDS / 2]);
    }
    return 0;
}
