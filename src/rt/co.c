/*
 * Stackful coroutines: see co.h.
 *
 * Stacks come from slabs, each one mapping: a header page, then slots of guard page, stack,
 * and at the top the struct co. A coroutine that ends does not leave its first frame: it waits
 * in co_main() for its next function, so that reuse costs a list operation.
 *
 * 1. A slab, its coroutines and their pool belong to one thread.
 * 2. The tops of stacks are spread over the sets of the first-level cache.
 * 3. co_slabs names every slab of the process; tools/gdb/co.py walks it.
 */
#include <pthread.h>
#include <sys/mman.h>
#include "rt/internal.h"

#if defined(__has_include)
#if __has_include(<valgrind/valgrind.h>)
#include <valgrind/valgrind.h>
#define HAVE_VALGRIND 1
#endif
#endif
#ifdef HAVE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define NO_ASAN __attribute__((no_sanitize_address, noinline))
#else
#define NO_ASAN
#endif
#ifdef HAVE_TSAN
#include <sanitizer/tsan_interface.h>
#define NO_TSAN __attribute__((no_sanitize("thread")))
#else
#define NO_TSAN
#endif

#define SLAB_SLOTS 32u
#define TOP_LEN    4096u /* above CO_STACK_LEN: struct co and the spread of the tops */
#define COLOUR_LEN 256u  /* step of that spread */
#define COLOURS    12u

_Static_assert(sizeof(struct co) + COLOUR_LEN * COLOURS <= TOP_LEN, "struct co fits its page");

struct co_slab {
    struct co_slab *next; /* of this thread */
    struct list all;      /* of the process */
    size_t len;
    unsigned nr_free; /* counted by co_pool_trim() */
    struct co *slots[SLAB_SLOTS];
#ifdef HAVE_VALGRIND
    unsigned valgrind_ids[SLAB_SLOTS];
#endif
};

void co_switch(void **save_sp, void *load_sp) __attribute__((visibility("hidden")));
void co_boot(void) __attribute__((visibility("hidden")));
_Noreturn void co_main(struct co *co) __attribute__((visibility("hidden"), used));

static _Thread_local struct co *current;
static _Thread_local struct co *pool;
static _Thread_local struct co_slab *slabs;

static pthread_mutex_t slabs_lock = PTHREAD_MUTEX_INITIALIZER;
extern struct list co_slabs;
struct list co_slabs = LIST_INIT(co_slabs); /* under slabs_lock */

bool on_valgrind(void)
{
#ifdef HAVE_VALGRIND
    return RUNNING_ON_VALGRIND > 0;
#else
    return false;
#endif
}

struct co *co_self(void)
{
    return current;
}

/* Lays the frame that the first co_switch() to this stack restores. */
static void lay_first_frame(struct co *co, char *top)
{
    uintptr_t *sp = (uintptr_t *)(void *)top;

#if defined(__x86_64__)
    sp -= 2 + 7; /* two words of zero end the chain of frames; then six registers, an address */
    memset(sp, 0, 9 * sizeof(*sp));
    sp[3] = (uintptr_t)co; /* r12 */
    sp[6] = (uintptr_t)co_boot;
#elif defined(__aarch64__)
    sp -= 2 + 20;
    memset(sp, 0, 22 * sizeof(*sp));
    sp[0] = (uintptr_t)co;       /* x19 */
    sp[11] = (uintptr_t)co_boot; /* x30 */
#else
#error "co_switch() is missing for this processor"
#endif
    co->sp = sp;
}

static struct co *init_slot(struct co_slab *slab, unsigned i, char *slot, size_t page, size_t len)
{
    char *end = slot + len - (i % COLOURS) * COLOUR_LEN;
    struct co *co = (struct co *)(void *)(end - (sizeof(*co) + 63) / 64 * 64);

    co->slab = slab;
    co->stack_low = slot + page;
    co->stack_len = (size_t)((char *)co - co->stack_low);
    lay_first_frame(co, (char *)co);
#ifdef HAVE_TSAN
    co->fiber = __tsan_create_fiber(0);
#endif
#ifdef HAVE_VALGRIND
    slab->valgrind_ids[i] = VALGRIND_STACK_REGISTER(co->stack_low, (char *)co);
#endif
    slab->slots[i] = co;
    return co;
}

static bool grow_pool(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t slot_len = page + (CO_STACK_LEN + TOP_LEN + page - 1) / page * page;
    size_t len = page + SLAB_SLOTS * slot_len;
    char *map = mmap(NULL, len, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);

    if (map == MAP_FAILED)
        return false;
    madvise(map, len, MADV_NOHUGEPAGE);
    for (unsigned i = 0; i < SLAB_SLOTS; i++) {
        if (mprotect(map + page + i * slot_len, page, PROT_NONE) < 0) {
            munmap(map, len);
            return false;
        }
    }
    struct co_slab *slab = (struct co_slab *)(void *)map;
    slab->len = len;
    for (unsigned i = SLAB_SLOTS; i-- > 0;) {
        struct co *co = init_slot(slab, i, map + page + i * slot_len, page, slot_len);

        co->next = pool;
        pool = co;
    }
    slab->next = slabs;
    slabs = slab;
    pthread_mutex_lock(&slabs_lock);
    list_push_back(&co_slabs, &slab->all);
    pthread_mutex_unlock(&slabs_lock);
    return true;
}

static void free_slab(struct co_slab *slab)
{
    pthread_mutex_lock(&slabs_lock);
    list_remove(&slab->all);
    pthread_mutex_unlock(&slabs_lock);
    for (unsigned i = 0; i < SLAB_SLOTS; i++) {
#ifdef HAVE_TSAN
        __tsan_destroy_fiber(slab->slots[i]->fiber);
#endif
#ifdef HAVE_VALGRIND
        VALGRIND_STACK_DEREGISTER(slab->valgrind_ids[i]);
#endif
    }
#ifdef HAVE_ASAN
    ASAN_UNPOISON_MEMORY_REGION(slab, slab->len);
#endif
    munmap(slab, slab->len);
}

/* Frees the slabs all of whose coroutines are in the pool. */
void co_pool_trim(void)
{
    for (struct co_slab *s = slabs; s; s = s->next)
        s->nr_free = 0;
    for (struct co *co = pool; co; co = co->next)
        co->slab->nr_free++;
    for (struct co **at = &pool; *at;) {
        if ((*at)->slab->nr_free == SLAB_SLOTS)
            *at = (*at)->next;
        else
            at = &(*at)->next;
    }
    for (struct co_slab **at = &slabs; *at;) {
        struct co_slab *s = *at;

        if (s->nr_free == SLAB_SLOTS) {
            *at = s->next;
            free_slab(s);
        } else {
            at = &s->next;
        }
    }
}

struct co *co_new(co_fn *fn, void *arg)
{
    if (!pool && !grow_pool())
        return NULL;
    struct co *co = pool;
    pool = co->next;
    co->fn = fn;
    co->arg = arg;
    co->ended = false;
    co->used = true;
    return co;
}

void co_free(struct co *co)
{
    DEBUG_CHECK(co != current && co->ranks == 0);
    co->home = NULL;
    co->used = false;
    co->next = pool;
    pool = co;
}

bool co_ended(const struct co *co)
{
    return co->ended;
}

/* The switches proper carry no instrumentation of their own: the frame they run in may be on a
 * fake stack that the switch retires. */
NO_ASAN NO_TSAN void co_enter(struct co *co)
{
    DEBUG_CHECK(!current && !co->ended);
    current = co;
#ifdef HAVE_ASAN
    __sanitizer_start_switch_fiber(&co->plain_fake, co->stack_low, co->stack_len);
#endif
#ifdef HAVE_TSAN
    void *here = __tsan_get_current_fiber();
    co->plain_fake = here;
    __tsan_switch_to_fiber(co->fiber, 0);
#endif
    co_switch(&co->plain_sp, co->sp);
#ifdef HAVE_ASAN
    __sanitizer_finish_switch_fiber(co->plain_fake, NULL, NULL);
#endif
    current = NULL;
}

static inline NO_TSAN void leave(struct co *co)
{
#ifdef HAVE_ASAN
    __sanitizer_start_switch_fiber(co->ended ? NULL : &co->fake_stack, co->plain_low,
                                   co->plain_len);
#endif
#ifdef HAVE_TSAN
    __tsan_switch_to_fiber(co->plain_fake, 0);
#endif
    co_switch(&co->sp, co->plain_sp);
#ifdef HAVE_ASAN
    __sanitizer_finish_switch_fiber(co->ended ? NULL : co->fake_stack, &co->plain_low,
                                    &co->plain_len);
#endif
}

NO_ASAN NO_TSAN void co_suspend(void)
{
    DEBUG_CHECK(current);
    leave(current);
}

NO_ASAN NO_TSAN SUSPENDS_UNCHECKED _Noreturn void co_main(struct co *co)
{
#ifdef HAVE_ASAN
    __sanitizer_finish_switch_fiber(NULL, &co->plain_low, &co->plain_len);
#endif
    for (;;) {
        co->fn(co->arg);
        co->ended = true;
#ifdef HAVE_ASAN
        co->fake_stack = NULL;
#endif
        leave(co);
    }
}
