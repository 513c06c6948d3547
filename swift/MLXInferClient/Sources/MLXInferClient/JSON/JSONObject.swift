/// The members of a JSON object, in the order in which they were added.
///
/// The order is kept because it matters to a model: a schema's properties are generated in it, and a prompt with tools written in
/// another order is another prompt. Equality does not look at it.
public struct JSONObject: Sendable {
    /// The names, in order.
    public private(set) var keys: [String] = []
    private var values: [String: JSONValue] = [:]

    /// An object from its members; of two with the same name the last one counts.
    public init(_ members: some Sequence<(String, JSONValue)> = []) {
        for (key, value) in members { self[key] = value }
    }

    /// The value of a member; setting nil removes it, `.null` is a value.
    public subscript(key: String) -> JSONValue? {
        get { values[key] }
        set {
            let old = values[key]
            values[key] = newValue
            if old == nil, newValue != nil { keys.append(key) }
            if old != nil, newValue == nil { keys.removeAll { $0 == key } }
        }
    }

    /// The members, in order.
    public var members: [(key: String, value: JSONValue)] {
        keys.compactMap { key in values[key].map { (key, $0) } }
    }
}

extension JSONObject: Hashable {
    public static func == (left: JSONObject, right: JSONObject) -> Bool { left.values == right.values }
    public func hash(into hasher: inout Hasher) { hasher.combine(values) }
}

extension JSONObject: ExpressibleByDictionaryLiteral {
    public init(dictionaryLiteral elements: (String, JSONValue)...) { self.init(elements) }
}
