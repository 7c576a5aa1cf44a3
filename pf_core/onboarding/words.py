"""What the name of a column says about its content.

A name is divided into words (`click_article_id`, `CustomerID`, `visitorid`), and these are looked up in lists. The
lists are short: words that public logs of shops, media, news and advertising use. They are written without accents:
`gehört` is looked up as gehort.
"""

import re
import unicodedata

USER = frozenset(
    "user usr customer cust visitor member client household player viewer reader listener subscriber person buyer "
    "shopper consumer reviewer rater uid userid fullvisitor guest passenger student patient learner email "
    "kunde kunden nutzer benutzer utilisateur usuario cliente utente".split()
)
WEAK_USER = frozenset("account profile author device cookie owner actor session anonymous subject".split())
"""Words that name a user where no better one does."""

ITEM = frozenset(
    "item iid product article movie film book isbn asin video song track sku stock pin post news doc document listing "
    "hotel restaurant business recipe game app course photo image story content page url offer deal job poi venue "
    "anime beer joke podcast lesson dish meal show clip reel ad goods merchandise pid itemid productid movieid "
    "object material creative artikel produkt produit producto articulo prodotto".split()
)
WEAK_ITEM = frozenset("artist album campaign banner entity thing target location place brand query category".split())

TITLE = frozenset("title titel titulo titre titolo".split())
"""Words of things that are known by their titles, where a log has no better column."""

TIME = frozenset(
    "timestamp tstamp time ts datetime unixtime epoch at when date day dt clock utc occurred happened datum zeit "
    "zeitpunkt zeitstempel uhrzeit fecha hora heure".split()
)
WEAK_TIME = frozenset("date day dt created datum fecha".split())
OTHER_TIME = frozenset(
    "sent received collector etl original "
    "birth birthday signup registered registration expiry expires expiration updated modified release released "
    "published publish upload uploaded conversion end ended last first next since session start duration ingested "
    "loaded".split()
)
"""Words of times that are not those of the action."""

ROW = frozenset(
    "invoice order transaction basket session receipt request row index hit visit impression log ticket record message "
    "uuid guid event".split()
)
"""Words of ids that number rows or groups of rows, and neither users nor pins."""

ACTION = frozenset(
    "event action behavior behaviour interaction activity verb operation kind signal feedback engagement "
    "vorgang aktion ereignis aktivitat accion evento hecho tipo evenement azione".split()
)
WEAK_ACTION = frozenset("type name status".split())

SURFACE = (
    "surface referrer referer placement tab page screen source channel section origin feed module component environment"
    " platform device"
).split()
"""Words of columns that say where an action happened, the best one first."""

DURATION = frozenset("dwell watch watched play played listen listened spent view viewing stay engagement read".split())
DURATION_NAMES = frozenset("duration dwell dauer duracion duree durata".split())
"""Words that say without others that a column is a duration."""

LENGTH = frozenset("time duration seconds secs sec s ms millis milliseconds length msec".split())

RATING = frozenset("rating ratings rate score stars star grade overall".split())

QUANTITY = frozenset("quantity qty amount units count menge anzahl quantite cantidad".split())

MEASURE = (
    frozenset(
        "ms msec millis milliseconds millisekunden sec secs seconds sekunden segundos secondes amount price cost "
        "revenue preis betrag umsatz kosten precio importe monto prix montant prezzo".split()
    )
    | DURATION_NAMES
)
"""Words of columns that measure something, such as a time or money, and are no ids."""

INTEREST = "interest category topic genre genres tag tags department section subject type class group brand".split()
"""Words of columns of a catalogue that say what a pin is about, the best one first."""

CANDIDATE = frozenset(
    "candidate recommendable available availability active enabled visible published stock live open".split()
)

STRONG_ACTIONS = frozenset(
    "purchase purchased buy bought transaction order ordered like liked love save saved repin favorite favourite fav "
    "bookmark share shared forward follow comment cart addtocart add2cart wishlist download subscribe subscription "
    "install conversion convert complete completed finish finished upvote review rated checkout sale booking book "
    "reservation attribution long "
    "gekauft kauf bestellt bestellung gemerkt merken merkzettel warenkorb gespeichert geteilt bewertet beendet "
    "abonniert heruntergeladen comprado comprada compra carrito guardado guardada favorito compartido pedido terminado "
    "achete achat panier commande favori aime partage enregistre".split()
)
USES = frozenset(
    "click clicked play played listen listened watch watched view viewed read visit visited closeup open opened pv "
    "detail start started stream search enter rating pageview "
    "gesehen angesehen gehort angehort gelesen geklickt geoffnet gestartet abgespielt besucht aufgerufen ansicht klick "
    "visto vista visita visitado clic escuchado leido reproducido abierto vu vue clique ecoute lu consulte".split()
)
SHOWN = frozenset(
    "impression impressions shown show exposure expose exposed display displayed served delivered "
    "angezeigt eingeblendet mostrado affiche".split()
)
"""Words of rows that say what a user was shown, not what the user did."""

AGAINST = frozenset(
    "hate dislike disliked hide hidden report block unfollow unlike skip skipped remove removed removefromcart delete "
    "deleted downvote return returned refund cancel cancelled uninstall unsubscribe ban negative thumbsdown dismiss "
    "dismissed mute muted spam flag flagged ignore ignored reject rejected "
    "ubersprungen entfernt geloscht storniert retoure zuruckgegeben ausgeblendet gemeldet "
    "eliminado quitado saltado omitido devuelto devolucion cancelado ocultado "
    "supprime retire annule retourne masque saute".split()
)
"""Words of actions against a pin."""

NO_ACTION = frozenset("verified helpful mobile premium prime first new returning weekend organic test bot rand".split())
"""Words of flags that say something else of a row than what the user did, such as verified_purchase."""

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_a-zA-Z]+")

_ENDINGS = ("ids", "id", "no", "nr", "num", "number", "code", "key", "name", "s")
"""Endings that are often written without a separator, as in visitorid."""

_LISTS = USER | WEAK_USER | ITEM | WEAK_ITEM | TIME | ROW | ACTION | RATING


def words_of(name: str) -> list[str]:
    """Return the words of a name, in lower case; the last part of a dotted name comes first."""
    parts = re.split(r"[.]", name)
    found = [word.lower() for part in reversed(parts) for word in _PART.findall(_plain(part))]
    return [inner for word in found for inner in _divided(word)]


def _plain(text: str) -> str:
    """Return a text without accents."""
    return "".join(each for each in unicodedata.normalize("NFKD", text) if not unicodedata.combining(each))


def _divided(word: str) -> list[str]:
    """Divide a word such as visitorid into visitor and id, if the first is known."""
    if word in _LISTS:
        return [word]
    for ending in _ENDINGS:
        stem = word.removesuffix(ending)
        if stem != word and stem in _LISTS:
            return [stem] if ending == "s" else [stem, ending]
    return [word]


def says(name: str, words: frozenset[str]) -> bool:
    """Whether one of the words stands in a name."""
    return not words.isdisjoint(words_of(name))


def rank_of(name: str, words: list[str]) -> int | None:
    """Return the place of the first of the ranked words that stands in a name; None if none does."""
    own = set(words_of(name))
    return next((rank for rank, word in enumerate(words) if word in own), None)


def value_words(value: str) -> set[str]:
    """Return the words of a value such as add_to_cart or AddToCart, and all of them together: addtocart."""
    words = [word.lower() for word in _PART.findall(_plain(value))]
    return {*words, "".join(words)}
