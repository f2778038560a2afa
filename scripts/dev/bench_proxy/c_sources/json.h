/* Just enough JSON to find a field by its name in bytes that nobody means harm with. */
#ifndef PDPROXY_BENCH_JSON_H
#define PDPROXY_BENCH_JSON_H

#include "net.h"

#define EDGE 2048

static inline const char *skip_space(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) at++;
    return at;
}

/* Where the value of `name` (with its quotes) begins between `data` and `end`, or NULL. */
static inline const char *value_of(const char *data, const char *end, const char *name) {
    const char *at = memmem(data, (size_t)(end - data), name, strlen(name));
    if (!at) return NULL;
    at = skip_space(at + strlen(name), end);
    return at < end && *at == ':' ? skip_space(at + 1, end) : NULL;
}

/* The same in a body that may be mostly prompt: what is looked for stands near one of its ends, almost always. */
static inline const char *field_of(const char *data, const char *end, const char *name) {
    if (end - data <= 2 * EDGE) return value_of(data, end, name);
    const char *found = value_of(end - EDGE, end, name);
    if (!found) found = value_of(data, data + EDGE, name);
    return found ? found : value_of(data, end, name);
}

/* One past the end of the object that begins at `at`, or NULL. Its strings have no braces in them. */
static inline const char *object_end(const char *at, const char *end) {
    if (!at || at >= end || *at != '{') return NULL;
    for (int depth = 0; at < end; at++) {
        if (*at == '{') depth++;
        if (*at == '}' && --depth == 0) return at + 1;
    }
    return NULL;
}

/* Whether a value is written as `text`, spaces within it apart. */
static inline bool reads(const char *value, const char *end, const char *text) {
    if (!value) return false;
    for (; *text; text++, value++) {
        value = skip_space(value, end);
        if (value >= end || *value != *text) return false;
    }
    return true;
}

#endif
