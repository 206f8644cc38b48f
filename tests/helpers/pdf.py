"""A minimal PDF file."""

from __future__ import annotations


def pdf(*pages: str) -> bytes:
    """A PDF with a line on each page."""
    numbers = range(4, 4 + 2 * len(pages), 2)
    objects = [
        "1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj",
        f"2 0 obj <</Type/Pages/Kids[{' '.join(f'{n} 0 R' for n in numbers)}]/Count {len(pages)}>> endobj",
        "3 0 obj <</Type/Font/Subtype/Type1/BaseFont/Helvetica>> endobj",
    ]
    for n, line in zip(numbers, pages, strict=True):
        drawn = f"BT /F 9 Tf 9 9 Td ({line}) Tj ET"
        about = f"/Parent 2 0 R/MediaBox[0 0 200 50]/Contents {n + 1} 0 R/Resources<</Font<</F 3 0 R>>>>"
        objects += [f"{n} 0 obj <</Type/Page{about}>> endobj"]
        objects += [f"{n + 1} 0 obj <</Length {len(drawn)}>> stream\n{drawn}\nendstream endobj"]
    end = f"trailer <</Root 1 0 R/Size {len(objects) + 1}>>\nstartxref\n0\n%%EOF\n"
    return "\n".join(["%PDF-1.4", *objects, end]).encode()


PDF = pdf("Zel owns a snake.")
