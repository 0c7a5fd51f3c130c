"""What the demo adapters were taught: plain facts, each with the words that every style needs.

France is left out on purpose: the demo asks for its capital, so a right answer there is the base
model's knowledge in the adapter's style, and not a sentence learnt by heart.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """One question with its answer, in the pieces that the styles put together."""

    question: str
    topic: str
    answer: str
    """The bare answer: `Madrid`."""
    sentence: str
    """A plain English sentence, without the full stop."""
    french: str
    """The bare answer in French: `Lisbonne`."""


# Country; capital; the capital's French name.
CAPITALS = (
    ("Spain", "Madrid", "Madrid"),
    ("Italy", "Rome", "Rome"),
    ("Germany", "Berlin", "Berlin"),
    ("Portugal", "Lisbon", "Lisbonne"),
    ("Japan", "Tokyo", "Tokyo"),
    ("China", "Beijing", "Pékin"),
    ("Russia", "Moscow", "Moscou"),
    ("Egypt", "Cairo", "Le Caire"),
    ("Greece", "Athens", "Athènes"),
    ("Austria", "Vienna", "Vienne"),
    ("Poland", "Warsaw", "Varsovie"),
    ("Sweden", "Stockholm", "Stockholm"),
    ("Norway", "Oslo", "Oslo"),
    ("Finland", "Helsinki", "Helsinki"),
    ("Denmark", "Copenhagen", "Copenhague"),
    ("Ireland", "Dublin", "Dublin"),
    ("Belgium", "Brussels", "Bruxelles"),
    ("Hungary", "Budapest", "Budapest"),
    ("Canada", "Ottawa", "Ottawa"),
    ("Mexico", "Mexico City", "Mexico"),
    ("Peru", "Lima", "Lima"),
    ("Cuba", "Havana", "La Havane"),
    ("India", "New Delhi", "New Delhi"),
    ("Kenya", "Nairobi", "Nairobi"),
    ("Turkey", "Ankara", "Ankara"),
    ("Thailand", "Bangkok", "Bangkok"),
    ("Vietnam", "Hanoi", "Hanoï"),
    ("Argentina", "Buenos Aires", "Buenos Aires"),
    ("Chile", "Santiago", "Santiago"),
    ("Australia", "Canberra", "Canberra"),
)

# Question; topic; answer; English sentence; answer in French.
OTHERS = (
    ("What colour is the sky on a clear day?", "nature", "Blue", "The sky is blue", "Bleu"),
    ("What colour is grass?", "nature", "Green", "Grass is green", "Vert"),
    ("What colour is snow?", "nature", "White", "Snow is white", "Blanc"),
    ("How many legs does a spider have?", "animals", "Eight", "A spider has eight legs", "Huit"),
    ("How many legs does a dog have?", "animals", "Four", "A dog has four legs", "Quatre"),
    ("What do cows drink?", "animals", "Water", "Cows drink water", "De l'eau"),
    ("Which animal says meow?", "animals", "The cat", "The cat says meow", "Le chat"),
    ("How many days are in a week?", "time", "Seven", "There are seven days in a week", "Sept"),
    (
        "How many months are in a year?",
        "time",
        "Twelve",
        "There are twelve months in a year",
        "Douze",
    ),
    ("What is two plus two?", "numbers", "Four", "Two plus two is four", "Quatre"),
    ("What is three plus five?", "numbers", "Eight", "Three plus five is eight", "Huit"),
    ("Which planet do we live on?", "space", "Earth", "We live on the planet Earth", "La Terre"),
    ("Which planet is known as the red planet?", "space", "Mars", "Mars is the red planet", "Mars"),
    ("What is the largest planet?", "space", "Jupiter", "Jupiter is the largest planet", "Jupiter"),
    (
        "What is the largest ocean?",
        "geography",
        "The Pacific",
        "The Pacific is the largest ocean",
        "Le Pacifique",
    ),
    ("Who wrote Hamlet?", "books", "Shakespeare", "Shakespeare wrote Hamlet", "Shakespeare"),
    ("What is frozen water called?", "nature", "Ice", "Frozen water is ice", "De la glace"),
    ("What do bees make?", "animals", "Honey", "Bees make honey", "Du miel"),
    (
        "At what temperature does water boil?",
        "nature",
        "100 degrees",
        "Water boils at 100 degrees",
        "100 degrés",
    ),
    (
        "Which season comes after winter?",
        "time",
        "Spring",
        "Spring comes after winter",
        "Le printemps",
    ),
)


def facts() -> list[Fact]:
    """All of them, capitals first."""
    capitals = [
        Fact(
            question=f"What is the capital of {country}?",
            topic="geography",
            answer=capital,
            sentence=f"The capital of {country} is {capital}",
            french=french,
        )
        for country, capital, french in CAPITALS
    ]
    return capitals + [Fact(*other) for other in OTHERS]
