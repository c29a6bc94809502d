/* TILE(R) of each height, and ALL, the table of these functions. */

TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if HIGH > 6
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
#endif
static const Tile ALL[] = {0, NAME(1), NAME(2), NAME(3), NAME(4), NAME(5), NAME(6),
#if HIGH > 6
                           NAME(7), NAME(8), NAME(9), NAME(10), NAME(11), NAME(12), NAME(13), NAME(14)
#endif
};
