/*
 * Intrusive doubly linked list. A head and an unlinked node point at themselves.
 * The list owns nothing; a node is on at most one list.
 */
#ifndef VARVE_BASE_LIST_H
#define VARVE_BASE_LIST_H

#include <stdbool.h>
#include "base/own.h"

struct list {
    struct list *next, *prev;
};

#define LIST_INIT(name)                                                                            \
    {                                                                                              \
        &(name), &(name)                                                                           \
    }
#define list_entry(ptr, type, member) container_of(ptr, type, member)
#define list_for_each(it, head)       for (struct list *it = (head)->next; it != (head); it = it->next)
/* The current node may be removed in the body. */
#define list_for_each_safe(it, head)                                                               \
    for (struct list *it = (head)->next, *it##_next = it->next; it != (head);                      \
         it = it##_next, it##_next = it->next)

static inline void list_init(struct list *l)
{
    l->next = l->prev = l;
}
static inline bool list_empty(const struct list *l)
{
    return l->next == l;
}
static inline void list_add_after(struct list *pos, struct list *node)
{
    node->prev = pos;
    node->next = pos->next;
    pos->next->prev = node;
    pos->next = node;
}
static inline void list_push_back(struct list *head, struct list *node)
{
    list_add_after(head->prev, node);
}
static inline void list_push_front(struct list *head, struct list *node)
{
    list_add_after(head, node);
}
/* Unlinks; harmless on an unlinked node. */
static inline void list_remove(struct list *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    list_init(node);
}
/* First node, unlinked; NULL if the list is empty. */
static inline struct list *list_pop_front(struct list *head)
{
    struct list *node = head->next;

    if (node == head)
        return NULL;
    list_remove(node);
    return node;
}
/* Moves all nodes of `from` to the end of `to`. */
static inline void list_splice_back(struct list *to, struct list *from)
{
    if (list_empty(from))
        return;
    from->next->prev = to->prev;
    to->prev->next = from->next;
    from->prev->next = to;
    to->prev = from->prev;
    list_init(from);
}

#endif
