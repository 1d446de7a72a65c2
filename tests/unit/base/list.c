/* Intrusive lists: order, removal while walking, splicing. */
#include "base/list.h"
#include "test.h"

struct item {
    unsigned value;
    struct list link;
};

static unsigned long digits(struct list *head)
{
    unsigned long v = 0;

    list_for_each(it, head)
        v = v * 10 + list_entry(it, struct item, link)->value;
    /* The way back must agree. */
    unsigned long back = 0, scale = 1;
    for (struct list *it = head->prev; it != head; it = it->prev, scale *= 10)
        back += scale * list_entry(it, struct item, link)->value;
    CHECK_EQ(v, back);
    return v;
}

TEST(list_keeps_order)
{
    struct list head = LIST_INIT(head);
    struct item items[6];

    for (unsigned i = 0; i < 6; i++) {
        items[i].value = i + 1;
        list_init(&items[i].link);
    }
    CHECK(list_empty(&head) && list_pop_front(&head) == NULL);
    list_push_back(&head, &items[0].link);
    list_push_back(&head, &items[1].link);
    list_push_front(&head, &items[2].link);
    list_add_after(&items[0].link, &items[3].link);
    CHECK_EQ(digits(&head), 3142);
    list_remove(&items[0].link);
    list_remove(&items[0].link);
    CHECK(list_empty(&items[0].link));
    CHECK_EQ(digits(&head), 342);
    CHECK(list_pop_front(&head) == &items[2].link);
    CHECK_EQ(digits(&head), 42);
}

TEST(list_may_lose_the_current_node_while_walked)
{
    struct list head = LIST_INIT(head);
    struct item items[9];

    for (unsigned i = 0; i < 9; i++) {
        items[i].value = i + 1;
        list_push_back(&head, &items[i].link);
    }
    list_for_each_safe(it, &head) {
        if (list_entry(it, struct item, link)->value % 2)
            list_remove(it);
    }
    CHECK_EQ(digits(&head), 2468);
}

TEST(list_splice_moves_all)
{
    struct list a = LIST_INIT(a), b = LIST_INIT(b);
    struct item items[4];

    for (unsigned i = 0; i < 4; i++) {
        items[i].value = i + 1;
        list_push_back(i < 2 ? &a : &b, &items[i].link);
    }
    list_splice_back(&a, &b);
    CHECK(list_empty(&b));
    CHECK_EQ(digits(&a), 1234);
    list_splice_back(&a, &b);
    CHECK_EQ(digits(&a), 1234);
    list_splice_back(&b, &a);
    CHECK(list_empty(&a));
    CHECK_EQ(digits(&b), 1234);
}
