"""Tables of rows that tests change."""

import csv


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def written(path, changed):
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(changed[0]))
        table.writeheader()
        table.writerows(changed)
    return path
