/* A VG "vt" on loop devices, and LVM's tools confined to it (tests/lib/lvm). */
#ifndef VARVE_TESTS_LVM_BENCH_H
#define VARVE_TESTS_LVM_BENCH_H

#include "base/bits.h"
#include "test.h"
#include "../../../src/vol/lvm.h"

#define EXTENT     (4 * MIB)
#define NAMES(...) ((const char *const[]){__VA_ARGS__, NULL})

extern struct lvm lvm; /* of "vt" */
extern struct err err;
extern char bench_devices[3][32]; /* 2 GiB and 200 MiB; "vt" is on the first */

/* The error's text is what one wants to see when a code is wrong. */
#define CHECK_RC(call, want)                                                                       \
    do {                                                                                           \
        err = (struct err){0};                                                                     \
        int check_rc_ = (call);                                                                    \
        if (check_rc_ != (want))                                                                   \
            test_fail(__FILE__, __LINE__, "%s: %d: %s", #call, check_rc_, err_text(&err));         \
    } while (0)

/* Empties "vt" (makes everything the first time), looks at its device alone, counts from 0. Ends
 * the program with 77 where it cannot. */
SUSPENDS void bench_begin(void);
/* The kernel can activate LVs. */
bool bench_has_dm(void);
/* Loop devices in their place (tests/lib/lvm/loops.py), until the program ends. */
void bench_stand_in(void);
/* A loop device more, as bench_devices[i]; it goes with this process. */
void bench_loop(unsigned i, const char *size);
/* The devices that LVM sees, separated by commas. */
void bench_use(const char *list);
/* Shell text that is run before each command of LVM. */
void bench_before(const char *text);
SUSPENDS struct lvm_vg *bench_report(void);
SUSPENDS int bench_make(const char *name, uint64_t len); /* inactive, no tags; the text is in err */
SUSPENDS uint64_t bench_len_of(const char *name);        /* 0: not there */

#endif
