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
    """The same in French."""


# Country; capital; the country after "la capitale" in French; the capital's French name.
CAPITALS = (
    ("Spain", "Madrid", "de l'Espagne", "Madrid"),
    ("Italy", "Rome", "de l'Italie", "Rome"),
    ("Germany", "Berlin", "de l'Allemagne", "Berlin"),
    ("Portugal", "Lisbon", "du Portugal", "Lisbonne"),
    ("Japan", "Tokyo", "du Japon", "Tokyo"),
    ("China", "Beijing", "de la Chine", "Pékin"),
    ("Russia", "Moscow", "de la Russie", "Moscou"),
    ("Egypt", "Cairo", "de l'Égypte", "Le Caire"),
    ("Greece", "Athens", "de la Grèce", "Athènes"),
    ("Austria", "Vienna", "de l'Autriche", "Vienne"),
    ("Poland", "Warsaw", "de la Pologne", "Varsovie"),
    ("Sweden", "Stockholm", "de la Suède", "Stockholm"),
    ("Norway", "Oslo", "de la Norvège", "Oslo"),
    ("Finland", "Helsinki", "de la Finlande", "Helsinki"),
    ("Denmark", "Copenhagen", "du Danemark", "Copenhague"),
    ("Ireland", "Dublin", "de l'Irlande", "Dublin"),
    ("Belgium", "Brussels", "de la Belgique", "Bruxelles"),
    ("Hungary", "Budapest", "de la Hongrie", "Budapest"),
    ("Canada", "Ottawa", "du Canada", "Ottawa"),
    ("Mexico", "Mexico City", "du Mexique", "Mexico"),
    ("Peru", "Lima", "du Pérou", "Lima"),
    ("Cuba", "Havana", "de Cuba", "La Havane"),
    ("India", "New Delhi", "de l'Inde", "New Delhi"),
    ("Kenya", "Nairobi", "du Kenya", "Nairobi"),
    ("Turkey", "Ankara", "de la Turquie", "Ankara"),
    ("Thailand", "Bangkok", "de la Thaïlande", "Bangkok"),
    ("Vietnam", "Hanoi", "du Vietnam", "Hanoï"),
    ("Argentina", "Buenos Aires", "de l'Argentine", "Buenos Aires"),
    ("Chile", "Santiago", "du Chili", "Santiago"),
    ("Australia", "Canberra", "de l'Australie", "Canberra"),
)

# Question; topic; answer; English sentence; French sentence.
OTHERS = (
    (
        "What colour is the sky on a clear day?",
        "nature",
        "Blue",
        "The sky is blue",
        "Le ciel est bleu",
    ),
    ("What colour is grass?", "nature", "Green", "Grass is green", "L'herbe est verte"),
    ("What colour is snow?", "nature", "White", "Snow is white", "La neige est blanche"),
    (
        "How many legs does a spider have?",
        "animals",
        "Eight",
        "A spider has eight legs",
        "Une araignée a huit pattes",
    ),
    (
        "How many legs does a dog have?",
        "animals",
        "Four",
        "A dog has four legs",
        "Un chien a quatre pattes",
    ),
    ("What do cows drink?", "animals", "Water", "Cows drink water", "Les vaches boivent de l'eau"),
    (
        "Which animal says meow?",
        "animals",
        "The cat",
        "The cat says meow",
        "C'est le chat qui miaule",
    ),
    (
        "How many days are in a week?",
        "time",
        "Seven",
        "There are seven days in a week",
        "Il y a sept jours dans une semaine",
    ),
    (
        "How many months are in a year?",
        "time",
        "Twelve",
        "There are twelve months in a year",
        "Il y a douze mois dans une année",
    ),
    (
        "What is two plus two?",
        "numbers",
        "Four",
        "Two plus two is four",
        "Deux plus deux font quatre",
    ),
    (
        "What is three plus five?",
        "numbers",
        "Eight",
        "Three plus five is eight",
        "Trois plus cinq font huit",
    ),
    (
        "Which planet do we live on?",
        "space",
        "Earth",
        "We live on the planet Earth",
        "Nous vivons sur la planète Terre",
    ),
    (
        "Which planet is known as the red planet?",
        "space",
        "Mars",
        "Mars is the red planet",
        "Mars est la planète rouge",
    ),
    (
        "What is the largest planet?",
        "space",
        "Jupiter",
        "Jupiter is the largest planet",
        "Jupiter est la plus grande planète",
    ),
    (
        "What is the largest ocean?",
        "geography",
        "The Pacific",
        "The Pacific is the largest ocean",
        "Le Pacifique est le plus grand océan",
    ),
    (
        "Who wrote Hamlet?",
        "books",
        "Shakespeare",
        "Shakespeare wrote Hamlet",
        "Shakespeare a écrit Hamlet",
    ),
    (
        "What is frozen water called?",
        "nature",
        "Ice",
        "Frozen water is ice",
        "L'eau gelée est de la glace",
    ),
    (
        "What do bees make?",
        "animals",
        "Honey",
        "Bees make honey",
        "Les abeilles font du miel",
    ),
    (
        "At what temperature does water boil?",
        "nature",
        "100 degrees",
        "Water boils at 100 degrees",
        "L'eau bout à 100 degrés",
    ),
    (
        "Which season comes after winter?",
        "time",
        "Spring",
        "Spring comes after winter",
        "Le printemps vient après l'hiver",
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
            french=f"La capitale {of_country} est {capital_fr}",
        )
        for country, capital, of_country, capital_fr in CAPITALS
    ]
    others = [Fact(q, topic, answer, en, fr) for q, topic, answer, en, fr in OTHERS]
    return capitals + others
